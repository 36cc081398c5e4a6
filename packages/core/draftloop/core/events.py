"""Events: everything the loop decides, one JSON object a line, in `events.jsonl`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

EventKind = Literal[
    "run_started",
    "server_started",
    "measured",
    "progress",
    "train_step",
    "candidate",
    "promoted",
    "refused",
    "swap",
    "swap_failed",
    "drift",
    "vocabulary_rebuilt",
    "training_paused",
    "training_resumed",
    "speculation",
    "canary",
    "rolling",
    "rolled_out",
    "rolled_back",
    "worker_started",
    "worker_lost",
    "worker_stopped",
    "router_started",
    "router_lost",
    "trainer_started",
    "trainer_lost",
    "scaled",
    "phase",
    "run_finished",
    "interrupted",
    "error",
]


class Event(BaseModel):
    """One thing that happened. `data` holds the kind's own plain JSON fields."""

    model_config = ConfigDict(extra="forbid")

    kind: EventKind
    time: float = Field(default_factory=time.time)
    data: dict[str, Any] = Field(default_factory=dict)


class EventLog:
    """Append-only JSONL. Each line is flushed, so a killed run keeps what it said."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def emit(self, kind: EventKind, **data: Any) -> Event:
        event = Event(kind=kind, data=data)
        self._file.write(event.model_dump_json() + "\n")
        self._file.flush()
        return event

    def close(self) -> None:
        self._file.close()


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a run; a torn last line (killed writer) is skipped."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                yield Event.model_validate(json.loads(line))
            except json.JSONDecodeError:
                continue
