"""The trainer: records in, candidates out. A Ray actor around `draftloop.drafters.online`.

A delivery is written to the journal, and only then acknowledged; a step marks the records it used. So a
trainer that was killed goes on with the records, and the books, that it had.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
import torch

from draftloop.capture.buffer import ReplayBuffer
from draftloop.capture.journal import JOURNAL_FOLDER, Journal, Kept
from draftloop.capture.ledger import Counts
from draftloop.capture.observation import Observation, observe
from draftloop.capture.privacy import TAINT_REASON, Deletions, Subjects
from draftloop.capture.transport import Delivery, Receipt, RecordTransport, TransportError
from draftloop.core.config import Config
from draftloop.core.manifest import Lineage, Manifest
from draftloop.core.records import CaptureRecord
from draftloop.core.versions import VersionRegistry
from draftloop.drafters.batch import Batch, collate
from draftloop.drafters.checkpoint import load_any, save_drafter
from draftloop.drafters.device import use_cuda
from draftloop.drafters.dflash import DflashDrafter
from draftloop.drafters.dflash_loss import DflashSettings
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.eagle3_loss import TttSettings
from draftloop.drafters.layouts import build
from draftloop.drafters.lessons import LessonSettings
from draftloop.drafters.metrics import GateScore, expected_accepted_length, prepare_holdout
from draftloop.drafters.online import OnlineSettings, OnlineTrainer, StepReport
from draftloop.drafters.target import FrozenTarget, end_ids, load_target_weights, read_target_config
from draftloop.trainer.ray_transport import make_transport
from draftloop.trainer.vocabulary import VocabularyChange, rebuild, spoken_tokens

_MIB = 1 << 20
_HOUR_S = 3600.0
# Old records go in steps of this share of the retention time, a little early, so that none stays too long.
_RETENTION_STEP = 0.05


@dataclass(frozen=True, slots=True)
class Comparison:
    """Serving drafter and candidate on the same held-out records."""

    records: int
    before: GateScore
    after: GateScore

    @property
    def metrics(self) -> dict[str, float]:
        """What the candidate's manifest keeps of it."""
        return {
            "accept_length": self.after.accept_length,
            "parent_accept_length": self.before.accept_length,
        }


class Trainer:
    """Holds the replay buffer, the drafter in training and the one in service."""

    def __init__(self, target: Path, serving: Path, config: Config, store: Path | None = None) -> None:
        """store: the run's folder, which keeps records, demands to delete them, and the registry of versions over
        restarts; None: in memory only."""
        self._config = config
        self._device = "cuda" if use_cuda(config.trainer.device) else "cpu"
        if self._device == "cpu":
            torch.set_num_threads(config.trainer.threads)
        weights = load_target_weights(target)
        self._end_ids = end_ids(read_target_config(target))
        self._serving, self._manifest = self._load(serving)
        self._target = FrozenTarget.of(weights.embedding, weights.lm_head, self._serving.draft_ids().cpu())
        self._target = self._target.to(self._device)
        drafter, _ = self._load(serving)
        self._trainer = OnlineTrainer(drafter, self._target, online_settings(config), config.seed)
        self._trainer.guard(self._serving)
        self._deletions = None if store is None else Deletions(store)
        self._registry = None if store is None else VersionRegistry(store)
        self._tainted: str | None = None
        self._buffer = open_buffer(config, store)
        self._subjects = Subjects()
        self._lineage = Lineage()
        self._observations: list[Observation] = []
        self._spoken = spoken_tokens(self._trainer.drafter)
        self._transport: RecordTransport | None = None
        self._next_expiry = 0.0
        if store is not None:
            # What was demanded, or grew old, while nobody ran.
            self._obey_privacy(time.time())
        self._note_promoted(serving)

    def _load(self, folder: Path) -> tuple[Drafter, Manifest]:
        drafter, manifest = load_any(folder)
        return drafter.to(self._device), manifest

    def add_records(
        self,
        records: Sequence[CaptureRecord],
        dropped: int = 0,
        source: str = "",
        sequence: int = 0,
        now: float | None = None,
    ) -> Counts:
        """Take captured records; some are held out for the gate and never trained on. Acknowledged by returning.

        dropped: captured records that were lost on the way.  source, sequence: who delivers, and its running number
        from 1 on; a delivery that came before is passed over; 0: not numbered.  now: when they were received, seconds
        since the epoch; None: now.  Raises JournalError when they cannot be kept.
        """
        received = time.time() if now is None else now
        self._obey_privacy(received)
        if not self._buffer.has(source, sequence):
            wanted = [record for record in records if not self._forgotten(record, received)]
            self._buffer.add(wanted, received, dropped + len(records) - len(wanted), source, sequence)
            self._observations += [observe(record, self._spoken) for record in wanted]
        return self._buffer.counts

    def receive(self, delivery: Delivery | None) -> Receipt:
        """Fetch a delivery and take its records; the sender keeps it until it gets the receipt.

        One that cannot be fetched or arrives damaged is gone for good, and counted as dropped. Without a delivery,
        the receipt only tells the counts.
        """
        if delivery is None:
            return Receipt("", 0, self.add_records([]))
        if not self._buffer.has(delivery.source, delivery.sequence):
            self._fetch(delivery)
        return Receipt(delivery.source, delivery.sequence, self._buffer.counts)

    def _fetch(self, delivery: Delivery) -> None:
        if self._transport is None:
            self._transport = make_transport(self._config.transport)
        try:
            records, lost = self._transport.receive(delivery.reference), 0
        except TransportError:
            records, lost = [], delivery.records
        self.add_records(records, delivery.dropped + lost, delivery.source, delivery.sequence)

    def _forgotten(self, record: CaptureRecord, received: float) -> bool:
        """Whether somebody demanded it before it came."""
        return self._deletions is not None and self._deletions.cover(record, received)

    def _obey_privacy(self, now: float) -> None:
        """Delete what users demanded since the last time, and what is older than the retention time."""
        deletions = self._deletions
        if deletions is not None and (demanded := deletions.refresh()):
            self._buffer.delete(lambda kept: deletions.cover(kept.record, kept.time))
            if any(subject in self._subjects for subject in demanded):
                self._tainted = TAINT_REASON
        hours = self._config.privacy.retention_hours
        if hours is not None and now >= self._next_expiry:
            step = hours * _HOUR_S * _RETENTION_STEP
            self._buffer.expire(now - hours * _HOUR_S + step)
            self._next_expiry = now + step

    def take_observations(self) -> list[Observation]:
        """What the records added since the last call say about the traffic."""
        taken, self._observations = self._observations, []
        return taken

    def rebuild_vocabulary(self) -> VocabularyChange | None:
        """Let the draft vocabulary follow the buffered answers; None when that changes nothing."""
        change = rebuild(self._trainer, self._buffer.training(), self._end_ids, self._device)
        self._spoken = spoken_tokens(self._trainer.drafter)
        return change

    def train(self, seconds: float) -> list[StepReport]:
        """Optimiser steps for about `seconds`; none while there is nothing to learn from."""
        self._obey_privacy(time.time())
        deadline = time.monotonic() + seconds
        reports: list[StepReport] = []
        while time.monotonic() < deadline and (report := self._step()) is not None:
            reports.append(report)
        return reports

    def train_steps(self, count: int) -> list[StepReport]:
        """Exactly `count` optimiser steps; none while there is nothing to learn from."""
        reports: list[StepReport] = []
        while len(reports) < count and (report := self._step()) is not None:
            reports.append(report)
        return reports

    def _step(self) -> StepReport | None:
        settings = self._config.trainer
        drawn = [self._buffer.sample(settings.batch_tokens) for _ in range(settings.accumulate)]
        if not all(drawn):
            return None
        report = self._trainer.step(*(self._batch(kept) for kept in drawn))
        for kept in drawn:
            for one in kept:
                if not one.used:
                    self._note_use(one)
            # A step that was skipped counts too: its records would come again and again otherwise.
            self._buffer.mark_trained(kept)
        return report

    def _batch(self, kept: Sequence[Kept]) -> Batch:
        replayed = {id(one.record) for one in kept if one.trained}
        settings = self._config.trainer
        return collate(
            [one.record for one in kept],
            settings.max_length,
            self._device,
            self._trainer.generator,
            packed=settings.packed,
            replayed=lambda record: id(record) in replayed,
        )

    def _note_use(self, kept: Kept) -> None:
        self._subjects.add(kept.record)
        lineage = self._lineage
        lineage.records += 1
        lineage.domains[kept.record.domain] = lineage.domains.get(kept.record.domain, 0) + 1
        lineage.first_record_time = min(kept.time, lineage.first_record_time or kept.time)
        lineage.last_record_time = max(kept.time, lineage.last_record_time or kept.time)

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
        """Write the candidate as a checkpoint with its manifest, and whose records taught it; returns its folder."""
        lineage = self._lineage.model_copy(
            update={"tokens": self._trainer.tokens_seen, "train_steps": self._trainer.steps_done}, deep=True
        )
        self._subjects.save(folder)
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
        if self._registry is not None:
            self._registry.add(folder)
            if (why := self._tainted) is not None:
                self._registry.taint(lambda name: name == version, why)
        return folder

    def promoted(self, folder: Path) -> None:
        """The checkpoint in `folder` serves now: later candidates are compared with it."""
        self._serving, self._manifest = self._load(folder)
        self._trainer.guard(self._serving)
        self._note_promoted(folder)

    def _note_promoted(self, folder: Path) -> None:
        registry, name = self._registry, self._manifest.version
        if registry is None:
            return
        if not registry.knows(name):
            registry.add(folder)
        serving = registry.serving()
        if serving is None or serving.name != name:
            registry.move(name, "promoted", "it serves")

    def close(self) -> None:
        """Let another process have the store."""
        self._buffer.close()


def open_buffer(config: Config, store: Path | None) -> ReplayBuffer:
    """The replay buffer that the config describes, with its journal in `store`. Raises JournalError in one line."""
    capture = config.capture
    max_bytes = capture.buffer_mib * _MIB
    # Small enough that erasing old records rewrites little, large enough that there are few.
    journal = None if store is None else Journal(store / JOURNAL_FOLDER, max_bytes // 16)
    return ReplayBuffer(
        max_bytes, capture.domain_quota, capture.holdout_fraction, capture.replay_share, config.seed, journal
    )


def online_settings(config: Config) -> OnlineSettings:
    trainer = config.trainer
    return OnlineSettings(
        ttt=TttSettings(steps=trainer.ttt_steps, decay=trainer.ttt_decay, divergence=trainer.divergence),
        # The paper's 4, 5 and 7 for blocks of 8, 10 and 16.
        block=DflashSettings(gamma=min(config.drafter.block_size / 2, 7.0)),
        lessons=LessonSettings(refused_weight=trainer.refused_weight, guard_weight=trainer.guard_weight),
        learning_rate=trainer.learning_rate,
        warmup_steps=trainer.warmup_steps,
        cosine_steps=trainer.cosine_steps,
        weight_decay=trainer.weight_decay,
        clip_norm=trainer.clip_norm,
        ema_decay=trainer.ema_decay,
    )


def tree_widths(topk: int, steps: int) -> tuple[int, ...]:
    """How many guesses of each step the served tree holds, about: it narrows by half a level (4 -> 4, 2, 1, ...)."""
    return tuple(max(1, topk >> step) for step in range(steps))


TrainerActor = ray.remote(Trainer)
