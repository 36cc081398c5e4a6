"""Speculation that follows the load against every fixed setting, plain decoding included, paired in one run.

    python tests/bench/load_aware.py --drafter runs/demo/checkpoints/v5       about 20 minutes on 2 cores
    python tests/bench/load_aware.py                                          trains a drafter first: 10 minutes more

SmolLM2 at batches 1, 2, 4, 8, 16, and a trace in which the batch jumps between them. In each round every setting
answers the same held-out prompts; rounds are compared pair by pair, the order of the settings turns. Prompts are in
the cache before the clock starts. Plain decoding has a server of its own, started without a drafter; the server that
is not measured is suspended. One round before the first lets the server learn its costs and is not counted.

Last line, JSON. worst_vs_best_fixed: at the worst batch, tokens/s over the best fixed setting's there (mean of the
rounds' ratios, 90% bootstrap interval).  mixed_vs_best_single: over the trace, against the best one fixed setting.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from serving import Resting, speculative_worker
from transformers import AutoTokenizer

from draftloop.core.config import load_config
from draftloop.drafters.load.shapes import Shape
from draftloop.fleet.worker import Worker
from draftloop.generator.batch import generate_batch
from draftloop.generator.prompts import builtin_prompts, split
from draftloop.sglang.load.report import EVERY_S
from draftloop.sglang.load.settings import REPORT_FILE, pin
from draftloop.sglang.target import resolve_target
from draftloop.trainer.trainer import Trainer

BATCHES = (1, 2, 4, 8, 16)
TRACE = (1, 16, 2, 8, 1, 4, 16, 1, 2, 8)
FIXED = (Shape(1, 4, 2), Shape(2, 4, 4), Shape(3, 4, 8))
SETTINGS = ["server.threads=2", "server.start_timeout_s=900", "speculation.follow_load=true", "capture.sample_rate=0.0"]
HELD_OUT = 32


@dataclass(frozen=True)
class Server:
    """A worker, which rests while another is measured."""

    url: str
    worker: Worker
    resting: Resting


@dataclass(frozen=True)
class Setting:
    """name; server it runs on; shapes the server is pinned to (none: it follows the load, or has no drafter)."""

    name: str
    server: Server
    pinned: tuple[Shape, ...] = ()


def start(worker: Worker, drafter: Path | None) -> Server:
    resting = Resting()
    with resting.watch():
        url = worker.start(drafter)
    return Server(url, worker, resting)


def decode(setting: Setting, batches: Sequence[Sequence[tuple[int, ...]]], tokens: int) -> float:
    """Tokens/s of decoding each batch in turn, all its prompts at once."""

    def ask(prompts: Sequence[tuple[int, ...]], length: int) -> None:
        asyncio.run(
            generate_batch(
                setting.server.url, prompts, length, domain="heldout", concurrency=len(prompts), ignore_eos=True
            )
        )

    with setting.server.resting.awake():
        if setting.server.worker.load_folder.exists():
            pin(setting.server.worker.load_folder, setting.pinned)
        ask([prompt for prompts in batches for prompt in prompts], 1)
        begin = time.perf_counter()
        for prompts in batches:
            ask(prompts, tokens)
        return sum(map(len, batches)) * tokens / (time.perf_counter() - begin)


Rates = dict[str, list[float]]


def compare(settings: Sequence[Setting], rounds: int, measure: Callable[[Setting, int], float]) -> Rates:
    """Tokens/s of each setting in each round; the settings take turns in being first."""
    rates: Rates = {setting.name: [] for setting in settings}
    for number in range(rounds):
        turn = number % len(settings)
        for setting in [*settings[turn:], *settings[:turn]]:
            rates[setting.name].append(measure(setting, number))
    return rates


def against_best(rates: Rates) -> dict[str, Any]:
    """The load-following setting over the best fixed one (by mean), round by round."""
    ours = np.array(rates["follows"])
    means = {name: float(np.mean(values)) for name, values in rates.items()}
    best = max((name for name in rates if name != "follows"), key=lambda name: means[name])
    ratios = ours / np.array(rates[best])
    resampled = np.random.default_rng(0).choice(ratios, (2000, len(ratios))).mean(axis=1)
    low, high = np.quantile(resampled, (0.05, 0.95))
    return {
        "tokens_per_s": {name: round(value, 1) for name, value in means.items()},
        "best_fixed": best,
        "ratio": round(float(ratios.mean()), 3),
        "interval": [round(float(low), 3), round(float(high), 3)],
    }


def train_drafter(minutes: float, folder: Path) -> Path:
    """Serve an untrained drafter, capture for half of the time, train for the other half."""
    config = load_config(None, ["trainer.threads=2"])
    traffic, _ = split(builtin_prompts(), HELD_OUT, 0)
    with speculative_worker([SETTINGS[0], "speculation.follow_load=false"]) as bench:
        trainer = Trainer(bench.target, bench.drafters[0], config)
        chosen = [ids for prompt, ids in zip(bench.prompts, bench.input_ids, strict=True) if prompt in traffic]
        until, first = time.monotonic() + 30 * minutes, 0
        while time.monotonic() < until:
            part = [chosen[i % len(chosen)] for i in range(first, first + 16)]
            asyncio.run(generate_batch(bench.url, part, 160, domain="chat", concurrency=16))
            trainer.add_records(bench.worker.take(64))
            first += 16
    trainer.train(30 * minutes)
    return trainer.save_candidate(folder / "v1", "v1", {})


def heldout_prompts(target: Path) -> list[tuple[int, ...]]:
    """Token ids of the prompts that neither the demo nor `train_drafter` trains on."""
    tokenizer = AutoTokenizer.from_pretrained(str(target))
    _, heldout = split(builtin_prompts(), HELD_OUT, 0)
    return [
        tuple(tokenizer.apply_chat_template(list(p.messages), add_generation_prompt=True, return_dict=False))
        for p in heldout
    ]


def measure_all(
    settings: Sequence[Setting], prompts: Sequence[tuple[int, ...]], rounds: int, tokens: int
) -> dict[str, Any]:
    def some(count: int, turn: int) -> list[tuple[int, ...]]:
        return [prompts[(turn * 5 + i) % len(prompts)] for i in range(count)]

    def at(batch: int) -> Callable[[Setting, int], float]:
        return lambda setting, turn: decode(setting, [some(batch, turn)], tokens)

    def trace(setting: Setting, turn: int) -> float:
        return decode(setting, [some(batch, turn + i) for i, batch in enumerate(TRACE)], tokens // 2)

    follows = settings[0]
    for batch in BATCHES:
        decode(follows, [some(batch, 0)], 2 * tokens)
    result: dict[str, Any] = {"batches": {}}
    for batch in BATCHES:
        result["batches"][batch] = against_best(compare(settings, rounds, at(batch)))
        print(f"batch {batch}: {result['batches'][batch]}", flush=True)
    result["mixed"] = against_best(compare(settings, max(2, rounds // 2), trace))
    with follows.server.resting.awake():
        time.sleep(EVERY_S)
        decode(follows, [some(1, 0)], 2 * tokens)
    said = json.loads((follows.server.worker.load_folder / REPORT_FILE).read_text(encoding="utf-8"))
    worst = min(result["batches"].values(), key=lambda outcome: float(outcome["ratio"]))
    return {
        "worst_vs_best_fixed": worst["ratio"],
        "worst_interval": worst["interval"],
        "mixed_vs_best_single": result["mixed"]["ratio"],
        "mixed_interval": result["mixed"]["interval"],
        **result,
        "server_says": said,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafter", type=Path, help="EAGLE-3 checkpoint for SmolLM2; none: train one")
    parser.add_argument("--train-minutes", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48, help="decoded of each prompt")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="draftloop-load-")))
        drafter = arguments.drafter or train_drafter(arguments.train_minutes, scratch)
        config = load_config(None, [*SETTINGS, *arguments.overrides])
        target = resolve_target(config.target.path)
        workers = [Worker(target, config, scratch / f"{name}.log") for name in ("speculative", "plain")]
        for worker in workers:
            stack.callback(worker.stop)
        speculative, plain = start(workers[0], drafter), start(workers[1], None)
        for server in (speculative, plain):
            stack.callback(server.resting.resume)
        settings = [Setting("follows", speculative), Setting("plain", plain)]
        settings += [Setting(str(shape), speculative, (shape,)) for shape in FIXED]
        result = measure_all(settings, heldout_prompts(target), arguments.rounds, arguments.tokens)
        print(json.dumps(result))


if __name__ == "__main__":
    main()
