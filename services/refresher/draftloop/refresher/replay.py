"""Replay: a refresh from recorded traffic, with no server, no Ray and no clock.

Time is the records' own: they arrive in turns as they were received, training takes a fixed number of steps between
two tries of the gate, and the gate is tried every `gate.every_seconds` of recorded time. So the same file, config and
drafter give the same versions to the last bit, on the same machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from draftloop.capture.record_file import TimedRecord
from draftloop.core.config import Config
from draftloop.core.manifest import Manifest
from draftloop.core.versions import Version, VersionRegistry
from draftloop.fleet.fleet import Emit
from draftloop.refresher.candidates import Candidates
from draftloop.refresher.loop import RECORDS_A_TURN
from draftloop.trainer.trainer import Trainer


class Replay:
    """target, drafter: checkpoint folders.  out: new folder for the versions.  steps: optimiser steps for each try of
    the gate."""

    def __init__(self, target: Path, drafter: Path, config: Config, out: Path, steps: int, emit: Emit) -> None:
        self._config = config
        self._steps = steps
        self._now = 0.0
        self._trainer = Trainer(target, drafter, in_one_process(config))
        self._registry = VersionRegistry(out)
        first = self._registry.add(drafter)
        self._registry.move(first.name, "promoted", "the replay begins with it")
        number = int(first.name[1:]) + 1 if first.name[1:].isdigit() else 1
        # Without a server nobody knows what a step costs.
        self._candidates = Candidates(config, out / "checkpoints", number, emit, lambda: self._now, lambda _: None)

    def run(self, records: Sequence[TimedRecord]) -> list[Version]:
        """Refresh from `records`; returns the versions that were promoted, oldest first."""
        start = min((record.time for record in records), default=0.0)
        for part in _intervals(records, start, self._config.gate.every_seconds):
            done = 0
            for begin in range(0, len(part), RECORDS_A_TURN):
                turn = part[begin : begin + RECORDS_A_TURN]
                self._trainer.add_records([record.record for record in turn], now=turn[-1].time)
                due = self._steps * (begin + len(turn)) // len(part)
                done += len(self._trainer.train_steps(due - done))
            self._now = part[-1].time - start
            self._try_gate()
        return [version for version in self._registry.all() if version.state == "promoted"][1:]

    def _try_gate(self) -> None:
        comparison = self._trainer.compare()
        if comparison is None:
            return
        trial = self._candidates.judge(comparison)
        if not trial.decision.promote:
            return
        folder = self._trainer.save_candidate(trial.folder, trial.version, comparison.metrics)
        self._registry.add(folder)
        self._registry.move(trial.version, "promoted", trial.decision.reason)
        self._trainer.promoted(folder)
        self._candidates.promoted(trial)


def in_one_process(config: Config) -> Config:
    """The same steps without a training group."""
    trainer = config.trainer
    alone = {"processes": 1, "accumulate": trainer.accumulate * trainer.processes}
    return config.model_copy(update={"trainer": trainer.model_copy(update=alone)})


def _intervals(records: Sequence[TimedRecord], start: float, every_s: float) -> Iterator[list[TimedRecord]]:
    """The records in order of time, in parts of `every_s` seconds; empty parts are left out."""
    ordered = sorted(records, key=lambda record: record.time)
    for _, part in groupby(ordered, key=lambda record: int((record.time - start) // every_s)):
        yield list(part)


def checksums(registry: VersionRegistry) -> dict[str, str]:
    """The hash of each version's weights."""
    versions = registry.all()
    return {version.name: Manifest.load(registry.checkpoint(version.name)).weights_sha256 for version in versions}
