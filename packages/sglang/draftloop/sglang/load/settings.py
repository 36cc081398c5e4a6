"""What a server process is told about its steps' shapes, and what it reports."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from draftloop.drafters.load.shapes import Shape
from draftloop.sglang.algorithms import Algorithm

LOAD_ENV = "DRAFTLOOP_LOAD"
REPORT_FILE = "speculation.json"
PIN_FILE = "pinned_shapes.json"


class LoadSettings(BaseModel):
    """JSON in the environment variable DRAFTLOOP_LOAD. folder: where the scheduler writes `speculation.json` and reads
    `pinned_shapes.json`.  shapes: those it may run, the largest last.  follow: choose among them each step; else it
    runs the largest, and only times it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path
    algorithm: Algorithm = "EAGLE3"
    shapes: tuple[Shape, ...]
    follow: bool = True
    margin: float = Field(0.03, ge=0.0)

    @classmethod
    def from_environment(cls) -> LoadSettings | None:
        raw = os.environ.get(LOAD_ENV)
        return cls.model_validate_json(raw) if raw else None


def read_report(folder: Path) -> dict[str, Any] | None:
    """The scheduler's last report (`load.report`), None when there is none yet."""
    try:
        report: dict[str, Any] = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return report


def pin(folder: Path, shapes: Iterable[Shape]) -> None:
    """Make the server in whose `folder` this is run these shapes, one a step, in turn; none: follow the load again."""
    write_whole(folder / PIN_FILE, json.dumps([[s.depth, s.width, s.nodes] for s in shapes]))


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once, so that a reader never sees half of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


class Pinned:
    """The scheduler's side of `pin`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / PIN_FILE
        self._read_at = 0
        self._shapes: tuple[Shape, ...] = ()
        self._turn = 0

    def next(self) -> Shape | None:
        """This step's pinned shape, None to follow the load."""
        try:
            written = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        if written != self._read_at:
            self._read_at = written
            self._shapes = tuple(Shape(*item) for item in json.loads(self._path.read_text(encoding="utf-8")))
        if not self._shapes:
            return None
        self._turn += 1
        return self._shapes[self._turn % len(self._shapes)]
