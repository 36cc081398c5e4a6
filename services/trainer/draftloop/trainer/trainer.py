"""The trainer: records in, candidates out. A Ray actor around `draftloop.drafters.online`.

A delivery is written to the journal, and only then acknowledged; a step marks the records it used. So a
trainer that was killed goes on with the records, and the books, that it had, and from the last state it saved (see
`saved`). With `trainer.processes` above 1 it is the first of a group (see `peers`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from torch import Tensor

from draftloop.capture.buffer import ReplayBuffer
from draftloop.capture.journal import JOURNAL_FOLDER, Journal, Kept
from draftloop.capture.ledger import Counts
from draftloop.capture.observation import Observation, observe
from draftloop.capture.privacy import TAINT_REASON, Deletions, Subjects
from draftloop.capture.transport import Delivery, Receipt, RecordTransport, TransportError
from draftloop.core.config import Config
from draftloop.core.errors import CheckpointError
from draftloop.core.manifest import Lineage
from draftloop.core.records import CaptureRecord
from draftloop.core.versions import VersionRegistry
from draftloop.drafters.batch import Batch, collate
from draftloop.drafters.checkpoint import save_drafter
from draftloop.drafters.dflash import DflashDrafter
from draftloop.drafters.layouts import build
from draftloop.drafters.metrics import GateScore, expected_accepted_length, prepare_holdout
from draftloop.drafters.online import StepReport
from draftloop.drafters.target import end_ids, read_target_config
from draftloop.trainer.learner import Learner
from draftloop.trainer.peers import Peers, to_arrays
from draftloop.trainer.ray_transport import make_transport
from draftloop.trainer.saved import Facts, SavedTraining, forget_training
from draftloop.trainer.vocabulary import VocabularyChange, rebuilt, spoken_tokens

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


@dataclass(frozen=True, slots=True)
class Start:
    """How a trainer began. steps: done before.  reason: why it goes on from there, in one line."""

    steps: int
    reason: str


class Trainer:
    """Holds the replay buffer, the drafter in training and the one in service."""

    def __init__(self, target: Path, serving: Path, config: Config, store: Path | None = None) -> None:
        """store: the run's folder, which keeps records, demands to delete them, and the registry of versions over
        restarts; None: in memory only."""
        self._config = config
        self._store = store
        self._end_ids = end_ids(read_target_config(target))
        self._peers = Peers(target, serving, config)
        self._learner = Learner(target, serving, config, self._peers.mesh)
        self._online = self._learner.online
        self._deletions = None if store is None else Deletions(store)
        self._registry = None if store is None else VersionRegistry(store)
        self._tainted: str | None = None
        self._buffer = open_buffer(config, store)
        self._subjects = Subjects()
        self._lineage = Lineage()
        self._candidate: str | None = None
        self._observations: list[Observation] = []
        self._transport: RecordTransport | None = None
        self._next_expiry = 0.0
        self._next_save = time.monotonic() + config.trainer.save_every_seconds
        if store is not None:
            # What was demanded, or grew old, while nobody ran.
            self._obey_privacy(time.time())
        reason = self._resume()
        self._start = Start(self._online.steps_done, reason)
        self._spoken = spoken_tokens(self._online.drafter)
        self._note_promoted(serving)

    def started(self) -> Start:
        """How it began."""
        return self._start

    def _resume(self) -> str:
        """Go on from the saved state if it belongs to the drafter in service; why, or why not."""
        fresh = "training starts anew: "
        if self._store is None or self._deletions is None:
            return f"{fresh}nothing is kept"
        try:
            saved = SavedTraining.load(self._store)
            if saved is None:
                return f"{fresh}nothing was saved"
            manifest, taught = self._learner.manifest, Subjects(saved.facts.taught)
            if manifest.weights_sha256 not in saved.facts.drafters:
                return f"{fresh}what was saved belongs to another drafter than {manifest.version}"
            if self._deletions.touch(taught):
                forget_training(self._store)
                return f"{fresh}{TAINT_REASON}"
            with self._peers.also("resume", self._store):
                self._online.load_state_dict(saved.tensors)
        except CheckpointError as error:
            return f"{fresh}{error}"
        self._subjects, self._lineage = taught, saved.facts.lineage
        self._buffer.draws = saved.facts.draws
        used = set(saved.facts.used)
        for kept in self._buffer.entries:
            kept.used = kept.id in used
        return "training goes on from the saved state"

    def save_state(self) -> None:
        """Keep what an exact resume needs; nothing in memory only, or of what must not be taught on."""
        self._next_save = time.monotonic() + self._config.trainer.save_every_seconds
        if self._store is None or self._tainted is not None:
            return
        with self._peers.also("state"):
            tensors = self._online.state_dict()
        serving = self._learner.manifest.weights_sha256
        facts = Facts(
            drafters=(serving,) if self._candidate is None else (serving, self._candidate),
            lineage=self._lineage,
            taught=tuple(self._subjects),
            used=tuple(kept.id for kept in self._buffer.entries if kept.used),
            draws=self._buffer.draws,
        )
        SavedTraining(tensors, facts).save(self._store)

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
            if self._store is not None and any(subject in self._subjects for subject in demanded):
                self._tainted = TAINT_REASON
                forget_training(self._store)
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
        found = rebuilt(self._online.drafter, self._buffer.training(), self._end_ids)
        if found is None:
            return None
        move, change = found
        with self._peers.also("change_vocabulary", [part.numpy() for part in (move.ids, move.kept, move.source)]):
            self._online.change_vocabulary(move.to(self._learner.device))
        self._spoken = spoken_tokens(self._online.drafter)
        return change

    def train(self, seconds: float) -> list[StepReport]:
        """Optimiser steps for about `seconds`; none while there is nothing to learn from."""
        self._obey_privacy(time.time())
        deadline = time.monotonic() + seconds
        reports: list[StepReport] = []
        while time.monotonic() < deadline and (report := self._step()) is not None:
            reports.append(report)
        if time.monotonic() >= self._next_save:
            self.save_state()
        return reports

    def train_steps(self, count: int) -> list[StepReport]:
        """Exactly `count` optimiser steps; none while there is nothing to learn from."""
        reports: list[StepReport] = []
        while len(reports) < count and (report := self._step()) is not None:
            reports.append(report)
        return reports

    def _step(self) -> StepReport | None:
        settings = self._config.trainer
        drawn = [self._buffer.sample(settings.batch_tokens) for _ in range(settings.accumulate * settings.processes)]
        if not all(drawn):
            return None
        # Batch number n is rank n % processes' (see `online`).
        shares: list[list[Batch]] = [[] for _ in range(settings.processes)]
        for number, kept in enumerate(drawn):
            rank = number % settings.processes
            shares[rank].append(self._batch(kept, self._learner.device if rank == 0 else "cpu"))
        with self._peers.also("step", each=[[to_arrays(batch) for batch in share] for share in shares[1:]]):
            report = self._online.step(*shares[0])
        for kept in drawn:
            for one in kept:
                if not one.used:
                    self._note_use(one)
            # A step that was skipped counts too: its records would come again and again otherwise.
            self._buffer.mark_trained(kept)
        return report

    def _batch(self, kept: Sequence[Kept], device: str) -> Batch:
        replayed = {id(one.record) for one in kept if one.trained}
        settings = self._config.trainer
        return collate(
            [one.record for one in kept],
            settings.max_length,
            device,
            self._online.generator,
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
        learner, topk = self._learner, self._guesses()
        holdout = prepare_holdout(records, learner.target, self._config.trainer.max_length, learner.device)
        candidate = build(learner.serving.shape).to(learner.device)
        candidate.load_state_dict(self._candidate_weights())
        before = expected_accepted_length(learner.serving, holdout, learner.target, topk)
        after = expected_accepted_length(candidate, holdout, learner.target, topk)
        return Comparison(len(records), before, after)

    def _candidate_weights(self) -> dict[str, Tensor]:
        with self._peers.also("candidate"):
            return self._online.candidate_state_dict()

    def _guesses(self) -> tuple[int, ...]:
        """How many guesses of each step the server verifies: a tree's widths for EAGLE-3, a chain for DFlash."""
        if isinstance(serving := self._learner.serving, DflashDrafter):
            return (1,) * (serving.config.block_size - 1)
        return tree_widths(self._config.server.topk, self._config.trainer.ttt_steps)

    def save_candidate(self, folder: Path, version: str, metrics: dict[str, float]) -> Path:
        """Write the candidate as a checkpoint with its manifest, and whose records taught it; returns its folder."""
        lineage = self._lineage.model_copy(
            update={"tokens": self._online.tokens_seen, "train_steps": self._online.steps_done}, deep=True
        )
        self._subjects.save(folder)
        serving = self._learner.manifest
        candidate = save_drafter(
            folder,
            self._learner.serving.shape,
            self._candidate_weights(),
            version=version,
            parent=serving.version,
            target=serving.target,
            lineage=lineage,
            metrics=metrics,
        )
        if self._registry is not None:
            self._registry.add(folder)
            if (why := self._tainted) is not None:
                self._registry.taint(lambda name: name == version, why)
        self._candidate = candidate.weights_sha256
        self.save_state()
        return folder

    def promoted(self, folder: Path) -> None:
        """The checkpoint in `folder` serves now: later candidates are compared with it."""
        with self._peers.also("promoted", folder):
            self._learner.promoted(folder)
        self._note_promoted(folder)

    def _note_promoted(self, folder: Path) -> None:
        registry, name = self._registry, self._learner.manifest.version
        if registry is None:
            return
        if not registry.knows(name):
            registry.add(folder)
        serving = registry.serving()
        if serving is None or serving.name != name:
            registry.move(name, "promoted", "it serves")

    def close(self) -> None:
        """Keep the state, end the peers, and let another process have the store."""
        try:
            self.save_state()
        finally:
            self._peers.close()
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


def tree_widths(topk: int, steps: int) -> tuple[int, ...]:
    """How many guesses of each step the served tree holds, about: it narrows by half a level (4 -> 4, 2, 1, ...)."""
    return tuple(max(1, topk >> step) for step in range(steps))


TrainerActor = ray.remote(Trainer)
