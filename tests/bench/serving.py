"""What the serving benches share: a SmolLM2 worker with an untrained drafter, without Ray; servers that rest while
another is measured."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from transformers import AutoTokenizer

from draftloop.core.config import Config, load_config
from draftloop.fleet.worker import Worker
from draftloop.generator.prompts import Prompt, builtin_prompts
from draftloop.sglang.target import resolve_target
from draftloop.trainer.day0 import make_untrained


@dataclass
class Resting:
    """The processes started within `watch`. An idle server polls: two of them would slow a third one down."""

    processes: list[psutil.Process] = field(default_factory=list)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Note what is started here; it rests from the end on."""
        before = set(psutil.Process().children(recursive=True))
        yield
        self.processes = [child for child in psutil.Process().children(recursive=True) if child not in before]
        self.suspend()

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self.resume()
        try:
            yield
        finally:
            self.suspend()

    def suspend(self) -> None:
        for process in self.processes:
            process.suspend()

    def resume(self) -> None:
        """To be called before a stop too: a suspended process would not hear of it."""
        for process in self.processes:
            process.resume()


@dataclass(frozen=True)
class Bench:
    """A running worker. input_ids: the built-in prompts as the target's chat template writes them."""

    worker: Worker
    url: str
    config: Config
    target: Path
    drafters: tuple[Path, ...]
    prompts: tuple[Prompt, ...]
    input_ids: tuple[tuple[int, ...], ...]


@contextlib.contextmanager
def speculative_worker(overrides: list[str], drafters: int = 1) -> Iterator[Bench]:
    """Start a worker with the first of `drafters` untrained drafters (seeds 0, 1, ...); stop it at the end."""
    config = load_config(None, overrides)
    target = resolve_target(config.target.path)
    tokenizer = AutoTokenizer.from_pretrained(str(target))
    prompts = tuple(builtin_prompts())
    input_ids = tuple(
        tuple(tokenizer.apply_chat_template(list(p.messages), add_generation_prompt=True, return_dict=False))
        for p in prompts
    )
    with tempfile.TemporaryDirectory(prefix="draftloop-bench-") as scratch:
        folders = tuple(Path(scratch) / f"v{seed}" for seed in range(drafters))
        for seed, folder in enumerate(folders):
            make_untrained(target, config.drafter, input_ids, folder, folder.name, seed)
        worker = Worker(target, config, Path(scratch) / "server.log")
        try:
            url = worker.start(folders[0])
            yield Bench(worker, url, config, target, folders, prompts, input_ids)
        finally:
            worker.stop()
