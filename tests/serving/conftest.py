"""One speculative SGLang server for the folder's tests: a tiny target, an EAGLE-3 tree of 8 nodes, and the tap."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from device import DEVICE, EXACT
from tiny_llama import TinyTarget, random_prompts

from draftloop.core.config import Config
from draftloop.core.records import CaptureRecord
from draftloop.fleet.worker import Worker
from draftloop.trainer.day0 import make_untrained
from draftloop.trainer.trainer import Trainer

CHUNK = 64
CONFIG = Config.model_validate(
    {
        "target": {"context_length": 1024, "dtype": "float32"},
        "drafter": {"draft_vocab_size": 256},
        "server": {
            **EXACT,
            "threads": 1,
            "num_steps": 3,
            "topk": 4,
            "num_draft_tokens": 8,
            "max_running_requests": 8,
            "max_total_tokens": 8192,
            "chunked_prefill_size": CHUNK,
            "start_timeout_s": 420,
        },
        "speculation": {"follow_load": False},
        "capture": {"ring_mib": 16},
        "trainer": {"device": DEVICE, "batch_tokens": 256, "learning_rate": 3e-3},
    }
)
TRAINING_PROMPTS = random_prompts(24, [8, 12, 30], seed=1)
RECORDS_WITHIN_S = 30.0


@dataclass(frozen=True)
class Answer:
    """One greedy answer of the server."""

    request_id: str
    prompt: list[int]
    output: list[int]
    meta: dict[str, Any]

    @property
    def whole(self) -> list[int]:
        return [*self.prompt, *self.output]


@dataclass
class Served:
    """A running worker; v0 is the drafter it was born with."""

    worker: Worker
    url: str
    target: TinyTarget
    drafter: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _captured: dict[str, list[CaptureRecord]] = field(default_factory=dict)

    def ask_one(self, prompt: Sequence[int], tokens: int, domain: str = "chat") -> Answer:
        request_id = f"{domain}--{next(self._numbers)}"
        body = {
            "rid": request_id,
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        response = httpx.post(f"{self.url}/generate", json=body, timeout=300, trust_env=False)
        response.raise_for_status()
        answer = response.json()
        return Answer(request_id, list(prompt), answer["output_ids"], answer["meta_info"])

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int, domain: str = "chat") -> list[Answer]:
        """All prompts at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.ask_one(prompt, tokens, domain), prompts))

    def records(self, answers: Sequence[Answer]) -> list[CaptureRecord]:
        """The one record of each answer, waiting for the collector."""
        deadline = time.monotonic() + RECORDS_WITHIN_S
        missing = {answer.request_id for answer in answers} - self._captured.keys()
        while missing and time.monotonic() < deadline:
            self._take()
            missing -= self._captured.keys()
            time.sleep(0.05)
        assert not missing, f"no record of {sorted(missing)}"
        found = [self._captured[answer.request_id] for answer in answers]
        assert all(len(records) == 1 for records in found), "a request's span was cut"
        return [record for (record,) in found]

    def captured_ids(self) -> set[str]:
        """Every request captured so far."""
        self._take()
        return set(self._captured)

    def _take(self) -> None:
        while taken := self.worker.take(64):
            for record in taken:
                self._captured.setdefault(record.request_id, []).append(record)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def day0(target: TinyTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("day0") / "v0"
    make_untrained(target.folder, CONFIG.drafter, TRAINING_PROMPTS, folder, "v0", seed=0)
    return folder


@pytest.fixture(scope="session")
def trained(target: TinyTarget, day0: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(v1, v2): v0's drafter after 100 and 120 steps on what transformers says; v1's drafts are often accepted."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        trainer = Trainer(target.folder, day0, CONFIG)
        trainer.add_records([target.record(prompt, 48, "chat", i) for i, prompt in enumerate(TRAINING_PROMPTS)])
        folder, steps = tmp_path_factory.mktemp("trained"), 0
        for name, until in (("v1", 100), ("v2", 120)):
            while steps < until:
                steps += len(trainer.train(1e-6))
            trainer.save_candidate(folder / name, name, {})
    finally:
        torch.set_num_threads(threads)
    return folder / "v1", folder / "v2"


@pytest.fixture(scope="module")
def served(
    target: TinyTarget, day0: Path, trained: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """`trained` is asked for first: what can fail cheaply should not cost a server's start."""
    worker = Worker(target.folder, CONFIG, tmp_path_factory.mktemp("server") / "server.log")
    url = worker.start(day0)
    try:
        yield Served(worker, url, target, day0)
    finally:
        worker.stop()
