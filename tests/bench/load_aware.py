"""Speculation that follows the load against every fixed setting, plain decoding included, paired in one run.

    python tests/bench/load_aware.py --drafter runs/demo/checkpoints/v5       about 20 minutes on 2 cores
    python tests/bench/load_aware.py                                          trains a drafter first: 10 minutes more

SmolLM2 at batches 1, 2, 4, 8, 16, and a trace in which the batch jumps between them. As many requests as the batch
stream for a few seconds, so that it neither fills nor drains while the clock runs: requests that gain little would
otherwise be timed alone. In each round every setting answers the same held-out prompts; rounds are compared pair by
pair, the order of the settings turns. Prompts are in the cache before the clock starts. Plain decoding has a server of
its own, started without a drafter; the server that is not measured is suspended. A first stretch at every batch lets
the server learn its costs and is not counted.

Last line, JSON. worst_vs_best_fixed: at the worst batch, tokens/s over the best fixed setting's there (mean of the
rounds' ratios, 90% bootstrap interval).  mixed_vs_best_single: over the trace, against the best one fixed setting.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from serving import Resting, speculative_worker
from transformers import AutoTokenizer

from draftloop.core.config import load_config
from draftloop.drafters.load.shapes import Shape
from draftloop.fleet.worker import UNCAPTURED_DOMAIN, Worker
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
MOST_TOKENS = 600
SAME_STEP_S = 0.01


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


@dataclass(frozen=True)
class Stretch:
    """Tokens that a batch received, and over what time."""

    tokens: int
    seconds: float


async def stream_batch(url: str, prompts: Sequence[tuple[int, ...]], seconds: float) -> Stretch:
    """All prompts decode at once, from the first moment at which each has its first token."""
    counts, arrivals = [0] * len(prompts), list[tuple[float, int]]()

    async def stream(place: int) -> None:
        body = {
            "rid": f"{UNCAPTURED_DOMAIN}--{uuid.uuid4().hex}",
            "input_ids": list(prompts[place]),
            "stream": True,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": MOST_TOKENS, "ignore_eos": True},
        }
        async with client.stream("POST", f"{url}/generate", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    counts[place] = json.loads(line.removeprefix("data: "))["meta_info"]["completion_tokens"]
                    if all(counts):
                        arrivals.append((time.perf_counter(), sum(counts)))

    async with httpx.AsyncClient(timeout=600.0, trust_env=False) as client:
        streams = [asyncio.ensure_future(stream(place)) for place in range(len(prompts))]
        while not arrivals:
            await asyncio.sleep(SAME_STEP_S)
        await asyncio.sleep(seconds)
        await client.post(f"{url}/abort_request", json={"abort_all": True})
        await asyncio.gather(*streams)
    # The requests of a batch receive a step's tokens together.
    steps = [now for now, later in pairwise(arrivals) if later[0] - now[0] > SAME_STEP_S]
    (begin, before), (end, after) = steps[0], steps[-2]  # the last one may be the abort's
    return Stretch(after - before, end - begin)


def decode(setting: Setting, batches: Sequence[Sequence[tuple[int, ...]]], seconds: float) -> float:
    """Tokens/s of each batch in turn, for so many seconds each."""
    with setting.server.resting.awake():
        if setting.server.worker.load_folder.exists():
            pin(setting.server.worker.load_folder, setting.pinned)
        prompts = [prompt for batch in batches for prompt in batch]
        asyncio.run(
            generate_batch(setting.server.url, prompts, 1, domain=UNCAPTURED_DOMAIN, concurrency=16, ignore_eos=True)
        )
        done = [asyncio.run(stream_batch(setting.server.url, batch, seconds)) for batch in batches]
    return sum(stretch.tokens for stretch in done) / sum(stretch.seconds for stretch in done)


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
    settings: Sequence[Setting], prompts: Sequence[tuple[int, ...]], rounds: int, seconds: float
) -> dict[str, Any]:
    def some(count: int, turn: int) -> list[tuple[int, ...]]:
        return [prompts[(turn * 5 + i) % len(prompts)] for i in range(count)]

    def at(batch: int) -> Callable[[Setting, int], float]:
        return lambda setting, turn: decode(setting, [some(batch, turn)], seconds)

    def trace(setting: Setting, turn: int) -> float:
        return decode(setting, [some(batch, turn + i) for i, batch in enumerate(TRACE)], seconds)

    follows = settings[0]
    for batch in BATCHES:
        decode(follows, [some(batch, 0)], 3 * seconds)
    result: dict[str, Any] = {"batches": {}}
    for batch in BATCHES:
        result["batches"][batch] = against_best(compare(settings, rounds, at(batch)))
        print(f"batch {batch}: {result['batches'][batch]}", flush=True)
    result["mixed"] = against_best(compare(settings, max(2, rounds // 2), trace))
    decode(follows, [some(1, 0)], EVERY_S + seconds)  # until it has reported
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
    parser.add_argument("--seconds", type=float, default=4.0, help="that a batch decodes")
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
        result = measure_all(settings, heldout_prompts(target), arguments.rounds, arguments.seconds)
        print(json.dumps(result))


if __name__ == "__main__":
    main()
