"""Random mixes of requests for the tap's tests, as real clients send them: streamed, cut off, aborted, labelled."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import numpy as np
from tiny_llama import VOCAB, TinyTarget

from draftloop.capture.admission import Labels
from draftloop.core.records import CaptureRecord
from draftloop.fleet.worker import Worker
from draftloop.sglang.labels import DOMAIN_HEADER, DOMAIN_PARAM, TENANT_HEADER, TENANT_PARAM

WITHIN_S = 60.0
Ending = Literal["whole", "abort", "disconnect"]


@dataclass(frozen=True)
class Ask:
    """One request. after: output tokens that are awaited before it is ended early. by_header: labels in headers."""

    request_id: str
    prompt: list[int]
    tokens: int
    temperature: float = 0.0
    ending: Ending = "whole"
    after: int = 0
    labels: Labels = field(default=Labels("default", "default"))
    by_header: bool = False

    @property
    def body(self) -> dict[str, Any]:
        sampling: dict[str, Any] = {"temperature": self.temperature, "max_new_tokens": self.tokens}
        if not self.by_header:
            sampling["custom_params"] = {TENANT_PARAM: self.labels.tenant, DOMAIN_PARAM: self.labels.domain}
        return {"rid": self.request_id, "input_ids": self.prompt, "sampling_params": sampling, "stream": True}

    @property
    def headers(self) -> dict[str, str]:
        return {TENANT_HEADER: self.labels.tenant, DOMAIN_HEADER: self.labels.domain} if self.by_header else {}


@dataclass(frozen=True)
class Said:
    """What a client saw: output ids so far, and the server's last word on the request."""

    ask: Ask
    output: list[int]
    meta: dict[str, Any]

    @property
    def reason(self) -> str | None:
        """None when the client left before the end."""
        finish = self.meta["finish_reason"]
        return None if finish is None else str(finish["type"])


def random_mix(rng: np.random.Generator, count: int, stems: Sequence[list[int]]) -> list[Ask]:
    """`count` requests over shared prefixes, a third of them ended early."""
    asks = []
    for _ in range(count):
        stem = stems[rng.integers(len(stems))]
        ending: Ending = ("whole", "whole", "whole", "whole", "abort", "disconnect")[int(rng.integers(6))]
        asks.append(
            Ask(
                request_id=uuid.uuid4().hex,
                prompt=[*stem[: int(rng.integers(len(stem) + 1))], *_tokens(rng, int(rng.integers(1, 90)))],
                tokens=int(rng.integers(1, 60)) if ending == "whole" else 300,
                temperature=float(rng.choice([0.0, 0.7, 1.0])),
                ending=ending,
                after=int(rng.integers(0, 30)),
                labels=Labels(f"tenant{rng.integers(3)}", f"domain{rng.integers(3)}"),
                by_header=bool(rng.integers(2)),
            )
        )
    return asks


def too_much(rng: np.random.Generator) -> list[Ask]:
    """Answers so long that three of them do not fit into 1024 slots. SGLang admits three, as it reserves seven tenths
    of what a request may say."""
    return [
        Ask(uuid.uuid4().hex, _tokens(rng, int(rng.integers(5, 30))), 350, float(rng.choice([0.0, 1.0])))
        for _ in range(5)
    ]


def _tokens(rng: np.random.Generator, count: int) -> list[int]:
    return [int(token) for token in rng.integers(16, VOCAB, count)]


@dataclass
class Tapped:
    """A running worker, its traffic and what was captured of it."""

    worker: Worker
    url: str
    target: TinyTarget
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _captured: dict[str, list[CaptureRecord]] = field(default_factory=dict)

    def ask(self, prompt: list[int], tokens: int, labels: Labels, temperature: float = 0.0) -> Ask:
        return Ask(f"plain-{next(self._numbers)}", prompt, tokens, temperature, labels=labels)

    def run(self, asks: Sequence[Ask], at_once: int = 8) -> list[Said]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(self.say, asks))

    def say(self, ask: Ask) -> Said:
        """Stream the answer; end it early as asked."""
        said = Said(ask, [], {"finish_reason": None})
        aborted = False
        with httpx.stream(
            "POST", f"{self.url}/generate", json=ask.body, headers=ask.headers, timeout=300, trust_env=False
        ) as stream:
            stream.raise_for_status()
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                said = Said(ask, event["output_ids"], event["meta_info"])
                if len(said.output) < ask.after:
                    continue
                if ask.ending == "disconnect":
                    break
                if ask.ending == "abort" and not aborted:
                    self.post("/abort_request", {"rid": ask.request_id})
                    aborted = True
        return said

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
        response = httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=300, trust_env=False)
        response.raise_for_status()
        return response

    def settle(self) -> None:
        """Wait until the server has nothing to do and every request it captured is closed."""
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            loads = httpx.get(f"{self.url}/v1/loads?include=core", timeout=60, trust_env=False).json()["loads"]
            idle = all(load["num_running_reqs"] + load["num_waiting_reqs"] == 0 for load in loads)
            if idle and self._ring_is_read() and self.worker.counts().open_requests == 0:
                return
            time.sleep(0.1)
        raise AssertionError(f"requests are left open: {self.worker.counts()}")

    def _ring_is_read(self) -> bool:
        ring = self.worker._ring
        assert ring is not None
        return ring.counters().pending == 0

    def captured(self) -> dict[str, list[CaptureRecord]]:
        """All records so far, by request; call `settle` first."""
        while taken := self.worker.take(64):
            for record in taken:
                self._captured.setdefault(record.request_id, []).append(record)
        return self._captured
