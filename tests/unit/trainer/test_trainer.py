"""The trainer as a plain class: records of a tiny Llama in, candidates with manifests out.

Records are what transformers computes for greedy answers, so the loss has something true to find.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from shelf import Shelf
from tiny_llama import HIDDEN, LAYER_IDS, VOCAB, TinyTarget, make_tiny_target, random_prompts

from draftloop.capture.privacy import TAINT_REASON, Deletions, Subjects, subject_hash
from draftloop.capture.transport import Outbox
from draftloop.core.config import Config
from draftloop.core.errors import DraftloopError, ManifestError
from draftloop.core.manifest import Manifest, check_fits
from draftloop.core.records import CaptureRecord, VerifyStep
from draftloop.core.versions import VersionRegistry
from draftloop.drafters.checkpoint import verify_checkpoint
from draftloop.drafters.target import target_identity
from draftloop.drafters.vocab import ids_from_offsets
from draftloop.trainer.day0 import make_untrained
from draftloop.trainer.learner import online_settings
from draftloop.trainer.saved import TRAINING_FILE
from draftloop.trainer.trainer import Start, Trainer, tree_widths

CONFIG = Config.model_validate(
    {
        "server": {"topk": 4, "device": "cpu"},
        "drafter": {"draft_vocab_size": 256},
        "capture": {"holdout_fraction": 0.25},
        "trainer": {"device": "cpu", "ttt_steps": 3, "batch_tokens": 256, "learning_rate": 3e-3},
        "gate": {"min_records": 3},
    }
)
PROMPTS = random_prompts(24, [8, 12, 30], seed=1)
STEPS = 120


@pytest.fixture(autouse=True)
def _leave_this_process_as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def records(target: TinyTarget) -> list[CaptureRecord]:
    torch.set_num_threads(1)
    return [target.record(prompt, 48, ("chat", "code")[i % 2], i) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture
def day0(target: TinyTarget, tmp_path: Path) -> Path:
    folder = tmp_path / "v0"
    make_untrained(target.folder, CONFIG.drafter, PROMPTS, folder, "v0", seed=0)
    return folder


def test_the_day0_drafter_is_the_seeds(target: TinyTarget, tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_untrained(target.folder, CONFIG.drafter, PROMPTS, tmp_path / name, "v0", seed)
    one, same, other = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert one.keys() == same.keys()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])


def test_the_day0_drafter_is_shaped_for_its_target(target: TinyTarget, day0: Path) -> None:
    manifest = Manifest.load(day0)
    assert (manifest.version, manifest.parent, manifest.layer_ids) == ("v0", None, LAYER_IDS)
    assert manifest.draft_vocab_size == 256
    assert manifest.tensors["fc.weight"].shape == (HIDDEN, len(LAYER_IDS) * HIDDEN)
    ids = ids_from_offsets(load_file(day0 / "model.safetensors")["d2t"]).tolist()
    end = target.model.config.eos_token_id
    seen = {token for prompt in PROMPTS for token in prompt}
    assert end in ids
    # Seen tokens come first, then the lowest ids.
    assert len(seen) > 256 or seen <= set(ids)
    assert len(set(ids) & seen) >= min(255, len(seen))
    small = CONFIG.drafter.model_copy(update={"draft_vocab_size": 10 * VOCAB})
    capped = make_untrained(target.folder, small, [], day0.with_name("full"), "v0", seed=0)
    assert capped.draft_vocab_size == VOCAB


def test_the_manifest_fits_its_target_and_no_other(target: TinyTarget, day0: Path, tmp_path: Path) -> None:
    manifest = Manifest.load(day0)
    identity = target_identity(target.folder)
    check_fits(manifest, identity, LAYER_IDS)
    other = make_tiny_target(tmp_path / "other", seed=1)
    with pytest.raises(ManifestError, match="was trained for target"):
        check_fits(manifest, target_identity(other.folder), LAYER_IDS)
    with pytest.raises(ManifestError, match="reads target layers"):
        check_fits(manifest, identity, (0, 1, 2))


def test_without_records_there_is_nothing_to_do(target: TinyTarget, day0: Path) -> None:
    trainer = Trainer(target.folder, day0, CONFIG)
    assert trainer.train(30.0) == []
    assert trainer.compare() is None


def test_records_in_candidate_out(target: TinyTarget, day0: Path, records: list[CaptureRecord], tmp_path: Path) -> None:
    """add -> train -> compare -> save -> promoted, as the refresher calls it."""
    trainer = Trainer(target.folder, day0, CONFIG)
    counts = trainer.add_records(records[:1])
    assert trainer.compare() is None
    counts = trainer.add_records(records[1:])
    assert counts.captured == len(records) == counts.pending + counts.held_out
    assert counts.held_out >= 3

    start = trainer.compare()
    assert start is not None
    assert start.records == counts.held_out
    assert start.before == start.after, "the candidate begins as the serving drafter"

    reports = trainer.train_steps(STEPS)
    assert [report.step for report in reports] == list(range(1, STEPS + 1))
    assert all(math.isfinite(report.loss) and not report.skipped for report in reports)
    mean = [sum(r.loss for r in part) / 20 for part in (reports[:20], reports[-20:])]
    assert mean[1] < 0.7 * mean[0]

    comparison = trainer.compare()
    assert comparison is not None
    assert comparison.before == start.before
    assert comparison.after.accept_length > comparison.before.accept_length + 0.25

    folder = trainer.save_candidate(tmp_path / "v1", "v1", {"accept_length": comparison.after.accept_length})
    manifest = verify_checkpoint(folder, target_identity(target.folder), LAYER_IDS)
    assert (manifest.version, manifest.parent) == ("v1", "v0")
    assert manifest.metrics == {"accept_length": comparison.after.accept_length}
    lineage = manifest.lineage
    assert (lineage.records, lineage.train_steps) == (counts.pending, STEPS)
    assert sum(lineage.domains.values()) == counts.pending
    assert set(lineage.domains) == {"chat", "code"}
    assert lineage.tokens == sum(report.tokens for report in reports)
    assert lineage.first_record_time is not None
    assert lineage.last_record_time is not None
    assert lineage.first_record_time <= lineage.last_record_time

    trainer.promoted(folder)
    after = trainer.compare()
    assert after is not None
    assert after.before == comparison.after
    trainer.train_steps(1)
    second = Manifest.load(trainer.save_candidate(tmp_path / "v2", "v2", {}))
    assert second.parent == "v1"


def test_the_draft_vocabulary_follows_the_traffic(
    target: TinyTarget, day0: Path, records: list[CaptureRecord], tmp_path: Path
) -> None:
    trainer = Trainer(target.folder, day0, CONFIG)
    assert trainer.rebuild_vocabulary() is None, "without traffic there is nothing to follow"
    trainer.add_records(records)
    seen = trainer.take_observations()
    assert trainer.take_observations() == []
    assert [one.domain for one in seen] == [record.domain for record in records]
    trainer.train_steps(3)
    ids = set(ids_from_offsets(load_file(day0 / "model.safetensors")["d2t"]).tolist())
    answers = [record.token_ids[record.prompt_len :].tolist() for record in records]
    assert [one.unspoken for one in seen] == [sum(token not in ids for token in answer) for answer in answers]

    change = trainer.rebuild_vocabulary()
    assert change is not None
    assert change.replaced > 0
    assert change.coverage_after > change.coverage_before
    trainer.add_records(records)
    assert sum(one.unspoken for one in trainer.take_observations()) < sum(one.unspoken for one in seen)
    assert trainer.rebuild_vocabulary() is None or change.coverage_after == 1.0

    assert all(not report.skipped for report in trainer.train_steps(3))
    assert trainer.compare() is not None
    folder = trainer.save_candidate(tmp_path / "v1", "v1", {})
    manifest = verify_checkpoint(folder, target_identity(target.folder), LAYER_IDS)
    assert manifest.vocab_map_sha256 != Manifest.load(day0).vocab_map_sha256
    new = set(ids_from_offsets(load_file(folder / "model.safetensors")["d2t"]).tolist())
    assert len(new - ids) == change.replaced
    assert target.model.config.eos_token_id in new


def test_a_trainer_goes_on_with_the_records_of_the_last_one(
    target: TinyTarget, day0: Path, records: list[CaptureRecord], tmp_path: Path
) -> None:
    first = Trainer(target.folder, day0, CONFIG, tmp_path)
    for sequence, record in enumerate(records, 1):
        first.add_records([record], source="worker", sequence=sequence)
    first.train_steps(2)
    counts = first.add_records([], dropped=2)
    assert counts.balanced
    assert (counts.dropped, counts.captured) == (2, len(records) + 2)
    assert 0 < counts.trained < counts.trained + counts.pending
    first.close()
    again = Trainer(target.folder, day0, CONFIG, tmp_path)
    assert again.add_records([records[3]], source="worker", sequence=4) == counts, "that delivery came before"
    assert len(again.train_steps(2)) == 2
    ours, theirs = first.compare(), again.compare()
    assert ours is not None
    assert theirs is not None
    assert theirs.before == ours.before
    assert theirs.records == ours.records


def _kept(target: TinyTarget, day0: Path, store: Path, records: list[CaptureRecord]) -> Trainer:
    """A trainer with a store, whose longer records are cropped by luck."""
    shorter = CONFIG.model_copy(update={"trainer": CONFIG.trainer.model_copy(update={"max_length": 48})})
    trainer = Trainer(target.folder, day0, shorter, store)
    trainer.add_records(records, now=1000.0, source="worker", sequence=1)
    return trainer


def test_a_resumed_trainer_equals_an_unbroken_one(
    target: TinyTarget, day0: Path, records: list[CaptureRecord], tmp_path: Path
) -> None:
    unbroken = _kept(target, day0, tmp_path / "unbroken", records)
    expected = [*unbroken.train_steps(3), *unbroken.train_steps(4)]
    first = _kept(target, day0, tmp_path / "resumed", records)
    reports = first.train_steps(3)
    first.close()
    second = _kept(target, day0, tmp_path / "resumed", records)
    assert second.started() == Start(3, "training goes on from the saved state")
    assert [*reports, *second.train_steps(4)] == expected
    folders = []
    for trainer, name in ((unbroken, "unbroken"), (second, "resumed")):
        folders.append(trainer.save_candidate(tmp_path / name / "checkpoints" / "v1", "v1", {}))
        trainer.close()
    one, other = (Manifest.load(folder) for folder in folders)
    assert one.weights_sha256 == other.weights_sha256
    assert one.lineage == other.lineage
    assert list(Subjects.load(folders[0])) == list(Subjects.load(folders[1]))
    tensors = [load_file(tmp_path / name / TRAINING_FILE) for name in ("unbroken", "resumed")]
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())


def test_a_killed_trainer_goes_on_from_what_it_saved_last(
    target: TinyTarget, day0: Path, records: list[CaptureRecord], tmp_path: Path
) -> None:
    killed = _kept(target, day0, tmp_path, records)
    killed.train_steps(2)
    candidate = killed.save_candidate(tmp_path / "checkpoints" / "v1", "v1", {})
    killed.train_steps(3)
    killed._buffer.close()
    for drafter, start in (
        (day0, Start(2, "training goes on from the saved state")),
        (candidate, Start(2, "training goes on from the saved state")),
    ):
        again = _kept(target, drafter, tmp_path, records)
        assert again.started() == start
        again._buffer.close()
    other = tmp_path / "other"
    make_untrained(target.folder, CONFIG.drafter, PROMPTS, other, "v7", seed=9)
    again = _kept(target, other, tmp_path, records)
    assert again.started() == Start(0, "training starts anew: what was saved belongs to another drafter than v7")
    again._buffer.close()
    state = (tmp_path / TRAINING_FILE).read_bytes()
    (tmp_path / TRAINING_FILE).write_bytes(state[:-8])
    again = _kept(target, day0, tmp_path, records)
    assert again.started().reason.startswith(f"training starts anew: {tmp_path / TRAINING_FILE} cannot be read")
    again._buffer.close()


def test_what_must_be_forgotten_is_not_taught_on(
    target: TinyTarget, day0: Path, records: list[CaptureRecord], tmp_path: Path
) -> None:
    first = _kept(target, day0, tmp_path, records)
    first.train_steps(2)
    first.close()
    taught = next(kept for kept in first._buffer.entries if kept.used).record
    Deletions(tmp_path).demand("request", taught.request_id)
    second = _kept(target, day0, tmp_path, records)
    assert second.started() == Start(0, f"training starts anew: {TAINT_REASON}")
    assert not (tmp_path / TRAINING_FILE).exists()
    second.train_steps(2)
    second.save_state()
    assert (tmp_path / TRAINING_FILE).exists()
    Deletions(tmp_path).demand("tenant", records[0].tenant)
    second.train(0.0)
    assert not (tmp_path / TRAINING_FILE).exists()
    second.close()
    assert not (tmp_path / TRAINING_FILE).exists()


def test_a_delivery_is_taken_once_and_a_damaged_one_is_dropped(
    target: TinyTarget, day0: Path, records: list[CaptureRecord]
) -> None:
    trainer, shelf = Trainer(target.folder, day0, CONFIG), Shelf()
    trainer._transport = shelf
    waiting = list(records[:8])
    outbox = Outbox(shelf, "worker", lambda most: [waiting.pop(0) for _ in waiting[:most]], lambda: 2)
    first = outbox.offer(5)
    assert first is not None
    receipt = trainer.receive(first)
    assert trainer.receive(first) == receipt
    assert (receipt.counts.captured, receipt.counts.dropped, receipt.counts.kept) == (7, 2, 5)
    second = outbox.offer(5, receipt)
    assert second is not None
    shelf.payloads[second.reference] = shelf.payloads[second.reference][:-1]
    receipt = trainer.receive(second)
    assert (receipt.counts.captured, receipt.counts.dropped, receipt.counts.balanced) == (10, 5, True)
    assert outbox.offer(5, receipt) is None
    assert trainer.receive(None).counts == receipt.counts


def test_one_trainer_a_store(target: TinyTarget, day0: Path, tmp_path: Path) -> None:
    first = Trainer(target.folder, day0, CONFIG, tmp_path)
    with pytest.raises(DraftloopError, match="is in use by process"):
        Trainer(target.folder, day0, CONFIG, tmp_path)
    first.close()


def private(**privacy: object) -> Config:
    return Config.model_validate(CONFIG.model_dump() | {"privacy": privacy})


def test_old_records_are_erased_from_memory_and_disk(
    target: TinyTarget, day0: Path, records: list[CaptureRecord], tmp_path: Path
) -> None:
    trainer = Trainer(target.folder, day0, private(retention_hours=1.0), tmp_path)
    now = time.time()
    trainer.add_records(records[:6], now=now - 3000)
    trainer.add_records(records[6:], now=now)
    assert trainer.add_records([], now=now).expired == 0
    counts = trainer.add_records([], now=now + 400)
    assert (counts.expired, counts.kept, counts.balanced) == (0, 24, True), "they are expired in steps"
    counts = trainer.add_records([], now=now + 600)
    assert (counts.expired, counts.kept, counts.balanced) == (6, 18, True)
    on_disk = b"".join(path.read_bytes() for path in (tmp_path / "journal").glob("*.segment"))
    assert on_disk.count(b"request_id") == 18
    trainer.close()
    late = Trainer(target.folder, day0, private(retention_hours=1e-9), tmp_path)
    assert late.add_records([]).kept == 0, "what grew old while nobody ran goes at the start"
    late.close()


def test_deleted_records_are_gone_and_do_not_come_back(
    target: TinyTarget, day0: Path, records: list[CaptureRecord], tmp_path: Path
) -> None:
    trainer = Trainer(target.folder, day0, CONFIG, tmp_path)
    trainer.add_records(records[:10])
    trainer.train_steps(3)
    folder = trainer.save_candidate(tmp_path / "v1", "v1", {})
    used = Subjects.load(folder)
    assert {subject_hash("request", kept.record.request_id) in used for kept in trainer._buffer.entries} == {True}
    mine = trainer._buffer.entries[0].record.request_id
    Deletions(tmp_path).demand("request", mine)
    counts = trainer.add_records(records[10:])
    assert (counts.deleted, counts.kept, counts.balanced) == (1, 23, True)
    trainer.save_candidate(tmp_path / "v2", "v2", {})
    assert [v.tainted is not None for v in VersionRegistry(tmp_path).all()] == [False, False, True]
    again = next(record for record in records if record.request_id == mine)
    assert trainer.add_records([again]).dropped == 1
    Deletions(tmp_path).demand("tenant", records[0].tenant)
    trainer.train(0.0)
    counts = trainer.add_records([])
    assert (counts.kept, counts.deleted, counts.balanced) == (0, 24, True)
    on_disk = b"".join(path.read_bytes() for path in (tmp_path / "journal").glob("*.segment"))
    assert b"request_id" not in on_disk
    trainer.close()


@pytest.mark.parametrize(
    ("topk", "steps", "widths"),
    [(4, 3, (4, 2, 1)), (1, 3, (1, 1, 1)), (8, 2, (8, 4)), (4, 5, (4, 2, 1, 1, 1)), (3, 3, (3, 1, 1))],
)
def test_tree_widths_narrow_by_half(topk: int, steps: int, widths: tuple[int, ...]) -> None:
    assert tree_widths(topk, steps) == widths


def test_every_setting_of_the_objective_reaches_it() -> None:
    changes = {
        "divergence": "log-acceptance", "refused_weight": 0.3, "guard_weight": 0.2, "cosine_steps": 40,
    }  # fmt: skip
    settings = online_settings(CONFIG.model_copy(update={"trainer": CONFIG.trainer.model_copy(update=changes)}))
    assert settings.ttt.divergence == "log-acceptance"
    assert (settings.lessons.refused_weight, settings.lessons.guard_weight) == (0.3, 0.2)
    assert settings.cosine_steps == 40


def test_accumulated_packed_and_guarded_steps(
    target: TinyTarget, records: list[CaptureRecord], day0: Path, tmp_path: Path
) -> None:
    """After a promotion the records of the earlier drafter count as replayed, and hold the drafter to what serves."""
    torch.set_num_threads(1)
    step = VerifyStep(12, np.array([1], np.int32), np.array([0], np.int32), 0, "v0")
    drafted = [dataclasses.replace(record, verify_steps=(step,)) for record in records]
    moved = []
    for weight in (0.0, 50.0):
        changes = {"accumulate": 2, "packed": True, "guard_weight": weight}
        trainer = Trainer(
            target.folder, day0, CONFIG.model_copy(update={"trainer": CONFIG.trainer.model_copy(update=changes)})
        )
        trainer.add_records(drafted)
        first = trainer.train_steps(1)[0]
        assert first.tokens > CONFIG.trainer.batch_tokens
        folder = trainer.save_candidate(tmp_path / f"v1-{weight}", "v1", {})
        trainer.promoted(folder)
        served = load_file(folder / "model.safetensors")
        trainer.train_steps(12)
        now = load_file(trainer.save_candidate(tmp_path / f"v2-{weight}", "v2", {}) / "model.safetensors")
        moved.append(float((now["lm_head.weight"] - served["lm_head.weight"]).norm()))
    assert moved[1] < 0.8 * moved[0]
