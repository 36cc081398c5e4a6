"""The trainer: records in, candidates out. A Ray actor around `draftloop.drafters.online`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
import torch

from draftloop.capture.buffer import Counts, ReplayBuffer
from draftloop.core.config import Config
from draftloop.core.manifest import Lineage, Manifest
from draftloop.core.records import CaptureRecord
from draftloop.drafters.batch import collate
from draftloop.drafters.checkpoint import load_any, save_drafter
from draftloop.drafters.device import use_cuda
from draftloop.drafters.dflash import DflashDrafter
from draftloop.drafters.dflash_loss import DflashSettings
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.eagle3_loss import TttSettings
from draftloop.drafters.layouts import build
from draftloop.drafters.metrics import GateScore, expected_accepted_length, prepare_holdout
from draftloop.drafters.online import OnlineSettings, OnlineTrainer, StepReport
from draftloop.drafters.target import FrozenTarget, load_target_weights

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Comparison:
    """Serving drafter and candidate on the same held-out records."""

    records: int
    before: GateScore
    after: GateScore


class Trainer:
    """Holds the replay buffer, the drafter in training and the one in service."""

    def __init__(self, target: Path, serving: Path, config: Config) -> None:
        self._config = config
        self._device = "cuda" if use_cuda(config.trainer.device) else "cpu"
        if self._device == "cpu":
            torch.set_num_threads(config.trainer.threads)
        weights = load_target_weights(target)
        self._serving, self._manifest = self._load(serving)
        self._target = FrozenTarget.of(weights.embedding, weights.lm_head, self._serving.draft_ids().cpu())
        self._target = self._target.to(self._device)
        drafter, _ = self._load(serving)
        self._trainer = OnlineTrainer(drafter, self._target, online_settings(config), config.seed)
        capture = config.capture
        self._buffer = ReplayBuffer(
            capture.buffer_mib * _MIB, capture.domain_quota, capture.holdout_fraction, config.seed
        )
        self._lineage = Lineage()
        self._domains: Counter[str] = Counter()

    def _load(self, folder: Path) -> tuple[Drafter, Manifest]:
        drafter, manifest = load_any(folder)
        return drafter.to(self._device), manifest

    def add_records(self, records: Sequence[CaptureRecord]) -> Counts:
        """Take captured records; some are held out for the gate and never trained on."""
        now = time.time()
        for record in records:
            self._buffer.add(record)
            self._lineage.records += 1
            self._domains[record.domain] += 1
            if self._lineage.first_record_time is None:
                self._lineage.first_record_time = now
            self._lineage.last_record_time = now
        return self._buffer.counts

    def train(self, seconds: float) -> list[StepReport]:
        """Optimiser steps for about `seconds`; none while there is nothing to learn from."""
        deadline = time.monotonic() + seconds
        reports: list[StepReport] = []
        settings = self._config.trainer
        while time.monotonic() < deadline:
            records = self._buffer.sample(settings.batch_tokens)
            if not records:
                break
            batch = collate(records, settings.max_length, self._device, self._trainer.generator)
            reports.append(self._trainer.step(batch))
        return reports

    def compare(self) -> Comparison | None:
        """Score the serving drafter and the candidate; None while too few records are held out."""
        gate = self._config.gate
        records = self._buffer.held_out(gate.max_eval_tokens)
        if len(records) < gate.min_records:
            return None
        holdout = prepare_holdout(records, self._target, self._config.trainer.max_length, self._device)
        candidate = build(self._serving.shape).to(self._device)
        candidate.load_state_dict(self._trainer.candidate_state_dict())
        topk = self._guesses()
        before = expected_accepted_length(self._serving, holdout, self._target, topk)
        after = expected_accepted_length(candidate, holdout, self._target, topk)
        return Comparison(len(records), before, after)

    def _guesses(self) -> tuple[int, ...]:
        """How many guesses of each step the server verifies: a tree's widths for EAGLE-3, a chain for DFlash."""
        if isinstance(self._serving, DflashDrafter):
            return (1,) * (self._serving.config.block_size - 1)
        return tree_widths(self._config.server.topk, self._config.trainer.ttt_steps)

    def save_candidate(self, folder: Path, version: str, metrics: dict[str, float]) -> Path:
        """Write the candidate as a checkpoint with its manifest; returns its folder."""
        lineage = self._lineage.model_copy(
            update={
                "tokens": self._trainer.tokens_seen,
                "train_steps": self._trainer.steps_done,
                "domains": dict(self._domains),
            }
        )
        save_drafter(
            folder,
            self._serving.shape,
            self._trainer.candidate_state_dict(),
            version=version,
            parent=self._manifest.version,
            target=self._manifest.target,
            lineage=lineage,
            metrics=metrics,
        )
        return folder

    def promoted(self, folder: Path) -> None:
        """The checkpoint in `folder` serves now: later candidates are compared with it."""
        self._serving, self._manifest = self._load(folder)

    def save_records(self, path: Path) -> None:
        """Keep the buffer on disk, so that a cut run loses none of its records."""
        self._buffer.save(path)

    def load_records(self, path: Path) -> Counts:
        """Continue with the records of an earlier run."""
        self._buffer.load(path)
        return self._buffer.counts


def online_settings(config: Config) -> OnlineSettings:
    trainer = config.trainer
    return OnlineSettings(
        ttt=TttSettings(steps=trainer.ttt_steps, decay=trainer.ttt_decay),
        # The paper's 4, 5 and 7 for blocks of 8, 10 and 16.
        block=DflashSettings(gamma=min(config.drafter.block_size / 2, 7.0)),
        learning_rate=trainer.learning_rate,
        warmup_steps=trainer.warmup_steps,
        weight_decay=trainer.weight_decay,
        clip_norm=trainer.clip_norm,
        ema_decay=trainer.ema_decay,
    )


def tree_widths(topk: int, steps: int) -> tuple[int, ...]:
    """How many guesses of each step the served tree holds, about: it narrows by half a level (4 -> 4, 2, 1, ...)."""
    return tuple(max(1, topk >> step) for step in range(steps))


TrainerActor = ray.remote(Trainer)
