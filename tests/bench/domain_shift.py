"""A shift from code to chat in SmolLM2's traffic: a refreshed drafter against the static one, on the same requests.

    python tests/bench/domain_shift.py [--steps 4] [--records FILE] [--figure docs/domain_shift.png]

First only code is asked for, then nine chat requests to each of code. Up to the shift there is one drafter, refreshed
as it goes; the static one is what serves when the shift comes. From then on both draft for every request, and each
request is scored BEFORE anything is learned from it. No prompt comes twice.

The form is offline: the target's greedy answers and states come from transformers (once, kept in --records), and the
accepted length of a request is the gate's, over every position of its answer. Trainer, buffer, gate, drift detectors,
vocabulary rebuild and checkpoints are the services' own, called in process, so the result depends on the seed and not
on the machine's speed. `tests/serving` and `tests/loop` show the same parts behind a server.

Last line, JSON: gain_over_static (accepted length after the shift, all requests, refreshed over static, less 1),
gain_recovered (the last half of them), worst_domain_change (the worst domain of that half), by_domain, swaps, refused,
drifts, detected_after (requests from the shift to the first alarm).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from smollm2_records import answered_prompts

from draftloop.capture.record_file import TimedRecord, read_records, write_records
from draftloop.core.config import Config, load_config
from draftloop.core.records import CaptureRecord
from draftloop.drafters.checkpoint import load_any
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.metrics import RecordScore, expected_accepted_length, mean_accept_length, prepare_holdout
from draftloop.drafters.target import FrozenTarget, load_target_weights
from draftloop.refresher.budget import TrainingBudget
from draftloop.refresher.drift import DriftMonitor
from draftloop.refresher.gate import decide
from draftloop.sglang.target import resolve_target
from draftloop.trainer.day0 import make_untrained
from draftloop.trainer.trainer import Trainer, tree_widths

BEFORE, AFTER_CODE, AFTER_CHAT = 60, 20, 180
BLOCK, BLOCKS_A_GATE = 10, 2
MAX_NEW_TOKENS, MAX_PROMPT = 112, 320
# One record a step; a few hundred requests leave few held out, and few make a window.
SETTINGS = ("capture.holdout_fraction=0.15", "trainer.batch_tokens=128", "drift.window_requests=20")


@dataclasses.dataclass
class Mark:
    """Something that happened before request number `at`."""

    at: int
    what: str


@dataclasses.dataclass
class Outcome:
    """One score a request and drafter, in the order of the requests."""

    refreshed: list[RecordScore] = dataclasses.field(default_factory=list)
    static: list[RecordScore] = dataclasses.field(default_factory=list)
    swaps: list[Mark] = dataclasses.field(default_factory=list)
    drifts: list[Mark] = dataclasses.field(default_factory=list)
    refused: int = 0


class Replay:
    """The refresher's loop over a list of records, without processes and clocks."""

    def __init__(self, config: Config, target: Path, folder: Path, prompts: Sequence[Sequence[int]]) -> None:
        self.config, self.folder = config, folder
        make_untrained(target, config.drafter, prompts, folder / "v0", "v0", config.seed)
        self.trainer = Trainer(target, folder / "v0", config)
        weights = load_target_weights(target)
        self.serving, _ = load_any(folder / "v0")
        self.target = FrozenTarget.of(weights.embedding, weights.lm_head, self.serving.draft_ids())
        self.version = 0
        self.monitor = DriftMonitor(config.drift, "v0")
        self.budget = TrainingBudget(config.drift.patience, config.gate.min_gain)
        self.outcome = Outcome()

    def score(self, drafters: Sequence[Drafter], records: Sequence[CaptureRecord]) -> list[list[RecordScore]]:
        """One list a drafter, in the records' order."""
        trainer, server = self.config.trainer, self.config.server
        order = sorted(range(len(records)), key=lambda i: records[i].num_tokens)
        holdout = prepare_holdout(records, self.target, trainer.max_length, "cpu")
        scores = []
        for drafter in drafters:
            found = expected_accepted_length(drafter, holdout, self.target, tree_widths(server.topk, trainer.ttt_steps))
            # The holdout is ordered by length.
            scores.append([score for _, score in sorted(zip(order, found.records, strict=True), key=lambda p: p[0])])
        return scores

    def learn(self, block: Sequence[CaptureRecord], scores: Sequence[RecordScore], at: int, steps: int) -> None:
        """Take the block's records, watch for drift, train."""
        self.trainer.add_records(block)
        for seen, score in zip(self.trainer.take_observations(), scores, strict=True):
            # A server that emits n tokens at this accepted length verifies n / length times.
            verify_steps = round(score.positions**2 / score.tokens) if score.positions else 0
            live = dataclasses.replace(
                seen, drafter_version=f"v{self.version}", verify_steps=verify_steps, emitted=score.positions
            )
            for drift in self.monitor.add(live):
                what: str = drift.signal
                self.budget.drift()
                if drift.action == "rebuild_vocabulary" and (change := self.trainer.rebuild_vocabulary()):
                    self.monitor.new_vocabulary()
                    what += f", {change.replaced} tokens replaced ({change.coverage_before:.3f} -> "
                    what += f"{change.coverage_after:.3f})"
                print(f"  request {at}: drift in {what}: {drift.before:.3f} -> {drift.now:.3f}", flush=True)
                self.outcome.drifts.append(Mark(at, drift.signal))
        if self.budget.spending:
            self.trainer.train_steps(steps * len(block))

    def gate(self, at: int) -> None:
        comparison = self.trainer.compare() if self.budget.spending else None
        if comparison is None:
            return
        decision = decide(comparison.before, comparison.after, self.config.gate, self.config.seed + at)
        print(f"  request {at}: {'promoted' if decision.promote else 'refused'}: {decision.reason}", flush=True)
        if decision.gain is not None:
            self.budget.candidate(decision.gain.gain)
        if not decision.promote:
            self.outcome.refused += 1
            return
        self.version += 1
        name = f"v{self.version}"
        self.trainer.save_candidate(self.folder / name, name, {})
        self.trainer.promoted(self.folder / name)
        self.serving, _ = load_any(self.folder / name)
        self.monitor.new_drafter(name)
        self.outcome.swaps.append(Mark(at, name))


def shifted(records: Sequence[CaptureRecord], seed: int) -> list[CaptureRecord]:
    """BEFORE code requests, then AFTER_CODE more among AFTER_CHAT of chat, shuffled."""
    rng = random.Random(seed)
    code = [record for record in records if record.domain == "code"]
    chat = [record for record in records if record.domain == "chat"]
    rng.shuffle(code)
    rng.shuffle(chat)
    after = code[BEFORE : BEFORE + AFTER_CODE] + chat[:AFTER_CHAT]
    rng.shuffle(after)
    return code[:BEFORE] + after


def run(config: Config, records: Sequence[CaptureRecord], steps: int) -> Outcome:
    traffic = shifted(records, config.seed)
    prompts = [record.token_ids[: record.prompt_len].tolist() for record in traffic[:BEFORE]]
    with tempfile.TemporaryDirectory(prefix="draftloop-bench-") as scratch:
        replay = Replay(config, resolve_target("smollm2"), Path(scratch), prompts)
        static = replay.serving
        for begin in range(0, len(traffic), BLOCK):
            block = traffic[begin : begin + BLOCK]
            if begin < BEFORE:
                (refreshed,) = replay.score([replay.serving], block)
                fixed = refreshed
            else:
                refreshed, fixed = replay.score([replay.serving, static], block)
            replay.outcome.refreshed += refreshed
            replay.outcome.static += fixed
            replay.learn(block, refreshed, begin + len(block), steps)
            if (begin // BLOCK + 1) % BLOCKS_A_GATE == 0:
                replay.gate(begin + len(block))
            if begin < BEFORE:
                static = replay.serving
            lengths = mean_accept_length(refreshed), mean_accept_length(fixed)
            print(f"{begin + len(block)} requests: refreshed {lengths[0]:.2f}, static {lengths[1]:.2f}", flush=True)
        return replay.outcome


def summarise(outcome: Outcome) -> dict[str, object]:
    def change(begin: int, domain: str | None) -> float:
        pair = (outcome.refreshed[begin:], outcome.static[begin:])
        lengths = [mean_accept_length([s for s in scores if domain in (None, s.domain)]) for scores in pair]
        return round(lengths[0] / lengths[1] - 1.0, 4)

    half = BEFORE + (len(outcome.refreshed) - BEFORE) // 2
    domains = {name: change(half, name) for name in ("chat", "code")}
    detected = [mark.at - BEFORE for mark in outcome.drifts if mark.at > BEFORE]
    return {
        "gain_over_static": change(BEFORE, None),
        "gain_recovered": change(half, None),
        "worst_domain_change": min(domains.values()),
        "by_domain": domains,
        "swaps": len(outcome.swaps),
        "refused": outcome.refused,
        "drifts": [f"{mark.what} at {mark.at}" for mark in outcome.drifts],
        "detected_after": detected[0] if detected else None,
    }


def draw(outcome: Outcome, path: Path) -> None:
    """Accepted length by domain over the requests, running means; swaps dotted, drift alarms as triangles."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    for domain, colour in (("code", "#d9902f"), ("chat", "#1f6feb")):
        for name, scores, style in (("refreshed", outcome.refreshed, "-"), ("static", outcome.static, "--")):
            points = [(i, s) for i, s in enumerate(scores) if s.domain == domain and s.positions]
            means = [mean_accept_length([s for _, s in points[max(0, k - 11) : k + 1]]) for k in range(len(points))]
            axes.plot([i for i, _ in points], means, style, color=colour, label=f"{domain}, {name}", linewidth=1.8)
    for mark in outcome.swaps:
        axes.axvline(mark.at, color="#8793a6", linewidth=0.8, linestyle=":")
    low = axes.get_ylim()[0]
    axes.plot([m.at for m in outcome.drifts], [low] * len(outcome.drifts), "^", color="#c0362c", label="drift alarm")
    axes.axvline(BEFORE, color="#1c2430", linewidth=1.2)
    axes.annotate("shift", (BEFORE, axes.get_ylim()[1]), xytext=(4, -12), textcoords="offset points")
    axes.set_xlabel("request")
    axes.set_ylabel("accepted length (running mean of 12 requests)")
    axes.legend(frameon=False, fontsize=9, ncols=2)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=4, help="training steps a request")
    parser.add_argument("--records", type=Path, help="read the target's answers from this file, or write them there")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    arguments = parser.parse_args()
    began = time.monotonic()
    if arguments.records is not None and arguments.records.exists():
        records = [timed.record for timed in read_records(arguments.records)]
    else:
        records = list(answered_prompts(MAX_NEW_TOKENS, MAX_PROMPT))
        if arguments.records is not None:
            write_records(arguments.records, [TimedRecord(record, 0.0, held_out=False) for record in records])
    print(f"{len(records)} requests answered in {time.monotonic() - began:.0f} s", flush=True)
    outcome = run(load_config(None, [*SETTINGS, *arguments.overrides]), records, arguments.steps)
    if arguments.figure is not None:
        draw(outcome, arguments.figure)
    print(json.dumps({**summarise(outcome), "seconds": round(time.monotonic() - began)}))


if __name__ == "__main__":
    main()
