"""Stages serve, swap and capture: a real server with a random target of Llama-3.1-8B's shape and random drafters.

    serve      each attention backend: start-up, tokens/s and time a verification, prompts of 1,000 tokens
    swap       hot swaps under load: the stall a streaming client sees, the copy, the checksums
    capture    paired batches with and without capture

serve, swap and capture, each started alone, also run the serving tests of their part on the device.

Random drafters are accepted hardly ever, so tokens/s tell the price of a step and not what speculation gains.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from random_checkpoint import write_random_llama
from tiny_llama import make_tiny_target, random_prompts

from draftloop.cli.measure import capture_overhead
from draftloop.core.config import Config, load_config
from draftloop.drafters.known_models import KNOWN_MODELS
from draftloop.fleet.worker import UNCAPTURED_DOMAIN, Worker, WorkerSwap
from draftloop.generator.batch import Generation, generate_batch
from draftloop.trainer.day0 import make_untrained
from stages.clock import Setting
from stages.result import Row

COMMON = ("drafter.kind=eagle3", "server.num_steps=3", "server.topk=4", "server.num_draft_tokens=8")
GPU = (
    "target.dtype=bfloat16", "target.context_length=4096", "drafter.draft_vocab_size=32000", "server.device=cuda",
    "server.max_running_requests=64", "server.max_total_tokens=200000", "server.chunked_prefill_size=4096",
    "server.mem_fraction=0.7", "server.start_timeout_s=300", "capture.ring_mib=1024", "capture.buffer_mib=8192",
)  # fmt: skip
DRY = (
    "target.dtype=float32", "drafter.draft_vocab_size=256", "server.device=cpu", "server.threads=1",
    "server.max_running_requests=8", "server.max_total_tokens=8192", "server.start_timeout_s=420",
    "capture.ring_mib=16",
)  # fmt: skip


TESTS = {
    "serve": ("test_server.py", "test_sampling.py"),
    "swap": ("test_swap.py",),
    "capture": ("test_tap.py",),
}
FOLDER = Path(__file__).parents[2] / "serving"


@dataclass(frozen=True)
class Plan:
    """How much is measured. batches: concurrent requests of the stage serve."""

    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    swaps: int
    pairs: int


@dataclass(frozen=True)
class Server:
    """A running worker and what to ask it."""

    worker: Worker
    url: str
    start_s: float


def measure(setting: Setting, names: Sequence[str]) -> list[Row]:
    """names: of the stages wanted; swap and capture share a server."""
    plan = Plan((1, 4), 24, 16, 4, 2) if setting.dry else Plan((1, 8, 32, 64), 1000, 64, 20, 12)
    backends = ["draftloop_torch"] if setting.dry else ["flashinfer", "draftloop_flashinfer"]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="draftloop-gpu-") as scratch:
        target, drafters = _models(Path(scratch), setting)
        if "serve" in names:
            for backend in backends:
                if setting.late:
                    rows.append(Row("serve", backend, "left out", None, "", note="out of time: --minutes"))
                    continue
                with _running(target, drafters[0], _config(setting, backend), Path(scratch)) as server:
                    rows += _serve(server, backend, plan)
        if {"swap", "capture"} & {*names}:
            with _running(target, drafters[0], _config(setting, backends[0]), Path(scratch)) as server:
                if "capture" in names:
                    rows += _capture(server, plan)
                if "swap" in names:
                    rows += _swap(server, drafters, plan)
    if setting.alone:
        rows += [_tests(stage, setting) for stage in names]
    return rows


def _tests(stage: str, setting: Setting) -> Row:
    """The serving tests of a stage, on the stage's device."""
    environment = {**os.environ, "DRAFTLOOP_TEST_DEVICE": setting.device.type}
    files = [str(FOLDER / name) for name in TESTS[stage]]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    begin = time.monotonic()
    left = max(60.0, setting.deadline - begin)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=left)
    except subprocess.TimeoutExpired:
        return Row(stage, "serving tests", "left out", None, "", note="out of time: --minutes")
    last = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()[-1]
    if done.returncode != 0:
        print(done.stdout, done.stderr, file=sys.stderr)
    what = "tests" if done.returncode == 0 else "failed"
    return Row(stage, "serving tests", what, time.monotonic() - begin, "s", note=last)


def _config(setting: Setting, backend: str) -> Config:
    own = DRY if setting.dry else (*GPU, f"server.attention={backend}")
    return load_config(None, [*COMMON, *own])


def _models(scratch: Path, setting: Setting) -> tuple[Path, list[Path]]:
    """A random target and two random drafters of it."""
    target = scratch / "target"
    make_tiny_target(target, seed=0)  # the tokenizer also, which any target will do with
    if not setting.dry:
        write_random_llama(target, KNOWN_MODELS["Llama-3.1-8B-Instruct"], setting.device)
    config = _config(setting, "flashinfer")
    drafters = [scratch / f"v{seed}" for seed in range(2)]
    for seed, folder in enumerate(drafters):
        make_untrained(target, config.drafter, _prompts(4, 24), folder, folder.name, seed)
    return target, drafters


@contextlib.contextmanager
def _running(target: Path, drafter: Path, config: Config, scratch: Path) -> Iterator[Server]:
    worker = Worker(target, config, scratch / "server.log")
    begin = time.monotonic()
    try:
        url = worker.start(drafter)
        yield Server(worker, url, time.monotonic() - begin)
    finally:
        worker.stop()


def _prompts(count: int, tokens: int) -> list[list[int]]:
    return random_prompts(count, [tokens], seed=3)


def _answers(url: str, batch: int, plan: Plan) -> list[Generation]:
    prompts = _prompts(batch, plan.prompt_tokens)
    return asyncio.run(
        generate_batch(
            url, prompts, plan.new_tokens, domain=UNCAPTURED_DOMAIN, concurrency=batch, ignore_eos=True
        )
    )  # fmt: skip


def _serve(server: Server, backend: str, plan: Plan) -> list[Row]:
    rows = [Row("serve", backend, "start", server.start_s, "s", note="graphs captured, ready to answer")]
    for batch in plan.batches:
        _answers(server.url, batch, plan)  # fills the prefix cache
        begin = time.perf_counter()
        done = _answers(server.url, batch, plan)
        spent = time.perf_counter() - begin
        steps = statistics.median(answer.spec_verify_ct or plan.new_tokens for answer in done)
        tokens = sum(answer.completion_tokens for answer in done)
        note = f"{spent / steps * 1e3:.1f} ms a step, {tokens / batch / steps:.2f} tokens accepted"
        rows.append(Row("serve", f"{backend} B{batch}", "decoding", tokens / spent, "tokens/s", note=note))
    return rows


def _capture(server: Server, plan: Plan) -> list[Row]:
    prompts = _prompts(8, plan.prompt_tokens)
    cost = capture_overhead(server.url, prompts, plan.pairs)
    server.worker.take(1 << 20)
    counts = server.worker.counts()
    ratios = sorted(pair.on / pair.off for pair in cost.pairs)
    note = f"on/off {ratios[0]:.3f} to {ratios[-1]:.3f} in {len(ratios)} pairs"
    note += f", {counts.records} records, {counts.records_dropped} lost"
    return [Row("capture", "B8", "overhead", 1 - statistics.median(ratios), "of tokens/s", note=note)]


class Load(threading.Thread):
    """Batches one after the other until `finish`."""

    def __init__(self, url: str, plan: Plan) -> None:
        super().__init__(daemon=True)
        self._url, self._plan = url, plan
        self._enough = threading.Event()
        self.answers = 0

    def run(self) -> None:
        while not self._enough.is_set():
            self.answers += len(_answers(self._url, 4, self._plan))

    def finish(self) -> int:
        self._enough.set()
        self.join()
        return self.answers


def _swap(server: Server, drafters: Sequence[Path], plan: Plan) -> list[Row]:
    def swaps(count: int) -> list[WorkerSwap]:
        return [server.worker.swap(drafters[(index + 1) % 2]) for index in range(count)]

    copy_ms = statistics.median(swap.report.update_ms for swap in swaps(2))
    load = Load(server.url, plan)
    load.start()
    done = swaps(plan.swaps)
    answers = load.finish()
    stalls = [swap.stall_ms for swap in done if swap.stall_ms is not None]
    steps = [swap.step_ms for swap in done if swap.step_ms is not None]
    right = sum(swap.report.checksum_ok for swap in done)
    note = f"longest {max(stalls):.0f} ms, step {statistics.median(steps):.1f} ms, {answers} answers meanwhile"
    note += f", {right} of {len(done)} checksums right"
    return [
        Row("swap", "under load", "stall", statistics.median(stalls), "ms", note=note),
        Row("swap", "idle", "copy", copy_ms, "ms", note="the update call alone"),
    ]
