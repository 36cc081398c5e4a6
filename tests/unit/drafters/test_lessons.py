"""What serving teaches: refused drafts are unlearned, replayed records are not forgotten."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from draftloop.core.records import CaptureRecord, VerifyStep
from draftloop.drafters.batch import Batch, collate
from draftloop.drafters.dflash import DflashDrafter
from draftloop.drafters.dflash_loss import DflashSettings
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.eagle3 import Eagle3Drafter
from draftloop.drafters.eagle3_loss import TttSettings
from draftloop.drafters.lessons import LessonSettings
from draftloop.drafters.objectives import forgetting_guard, unlikelihood
from draftloop.drafters.online import OnlineSettings, OnlineTrainer, objective_of
from draftloop.drafters.target import FrozenTarget

from .conftest import BLOCK, DFLASH, TINY, make_record, shaken

KINDS = ["eagle3", "dflash"]
STEPS, DECAY, GAMMA = 3, 0.8, 2.0
SETTINGS = OnlineSettings(
    ttt=TttSettings(steps=STEPS, decay=DECAY), block=DflashSettings(gamma=GAMMA), learning_rate=3e-3
)


def _drafter(kind: str, frozen: FrozenTarget, draft_ids: torch.Tensor) -> tuple[Drafter, FrozenTarget]:
    torch.manual_seed(1)
    if kind == "eagle3":
        return shaken(Eagle3Drafter.untrained(TINY, draft_ids, frozen.lm_head, None, seed=0)), frozen
    return shaken(DflashDrafter.untrained(DFLASH, None, seed=0)), FrozenTarget.of(
        frozen.embedding, frozen.lm_head, None
    )


def _record(kind: str, tokens: int, prompt_len: int, seed: int) -> CaptureRecord:
    return make_record(tokens, prompt_len, seed, layers=2 if kind == "dflash" else 3)


def _refuse(record: CaptureRecord, root: int, accepted: int, refused: int) -> CaptureRecord:
    """A chain of `accepted` right drafts and one that serving refused."""
    right = record.token_ids[root + 1 : root + 1 + accepted].tolist()
    drawn = np.array([*right, refused], np.int32), np.arange(accepted + 1, dtype=np.int32)
    step = VerifyStep(root, *drawn, accepted, "", np.array([refused], np.int32))
    return dataclasses.replace(record, verify_steps=(*record.verify_steps, step))


def _loss(
    drafter: Drafter, target: FrozenTarget, batch: Batch, lessons: LessonSettings, earlier: Drafter | None
) -> tuple[float, list[float]]:
    """The loss, and what a row of each step weighs in it."""
    objective = objective_of(drafter, target, dataclasses.replace(SETTINGS, lessons=lessons), earlier)
    plan = objective.plan(batch, torch.Generator().manual_seed(0))
    mass = plan.mass.tolist()
    if isinstance(drafter, Eagle3Drafter):
        weights = [DECAY**j / sum(DECAY**i for i in range(STEPS)) / mass[j] for j in range(STEPS)]
    else:
        weights = [math.exp(-j / GAMMA) / mass[j] for j in range(BLOCK - 1)]
    return float(objective.backward(batch, plan, plan.mass).loss), weights


@torch.no_grad()
def _logits(drafter: Drafter, target: FrozenTarget, batch: Batch, line: int, position: int, step: int) -> torch.Tensor:
    where = torch.zeros(len(batch.lengths), 1, dtype=torch.int64)
    where[line] = position
    return drafter.guess_logits(drafter.guess(batch, target, where, step + 1)[step][line], target)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_draft_adds_its_unlikelihood(
    kind: str, packed: bool, frozen: FrozenTarget, draft_ids: torch.Tensor
) -> None:
    drafter, target = _drafter(kind, frozen, draft_ids)
    # Refused at the first and at the second draft; token 4 is no draft token of EAGLE-3, so it cannot be unlearned.
    first = _refuse(_refuse(_record(kind, 12, 3, 1), 5, 1, 17), 8, 0, 8)
    records = [first, _refuse(_refuse(_record(kind, 9, 2, 2), 4, 0, 23), 6, 0, 4)]
    batch = collate(records, 64, "cpu", packed=packed)
    plain, weights = _loss(drafter, target, batch, LessonSettings(), None)
    extra = _loss(drafter, target, batch, LessonSettings(refused_weight=0.7), None)[0] - plain
    ids, expected = drafter.draft_ids().tolist(), 0.0
    for line, position, step, token in ((0, 4, 1, 17), (0, 7, 0, 8), (1, 3, 0, 23), (1, 5, 0, 4)):
        if token not in ids:
            continue
        where = (0, position + 12 * line) if packed else (line, position)
        teacher = batch.last_hidden[where[0], where[1] + 1 + step][None]
        logits = _logits(drafter, target, batch, where[0], where[1], step)
        row = unlikelihood(logits, torch.tensor([ids.index(token)]), target.draft_probs(teacher))
        expected += 0.7 * weights[step] * float(row)
    assert extra == pytest.approx(expected, rel=1e-3)
    assert extra > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_guard_adds_the_divergence_on_replayed_records_only(
    kind: str, frozen: FrozenTarget, draft_ids: torch.Tensor
) -> None:
    drafter, target = _drafter(kind, frozen, draft_ids)
    earlier = shaken(_drafter(kind, frozen, draft_ids)[0])
    records = [_record(kind, 4, 3, 1), _record(kind, 9, 2, 2)]
    fresh = collate(records, 64, "cpu")
    old = collate(records, 64, "cpu", replayed=lambda record: record.num_tokens == 4)
    guarded = LessonSettings(guard_weight=0.5)
    plain, weights = _loss(drafter, target, fresh, LessonSettings(), None)
    assert _loss(drafter, target, fresh, guarded, earlier)[0] == pytest.approx(plain)
    assert _loss(drafter, target, old, guarded, drafter)[0] == pytest.approx(plain, rel=1e-5)
    extra = _loss(drafter, target, old, guarded, earlier)[0] - plain
    # The rows of the replayed record, as (position, step).
    rows = [(1, 0), (1, 1), (2, 0)] if kind == "eagle3" else [(1, 0)]
    expected = 0.0
    for position, step in rows:
        now, then = (_logits(d, target, old, 0, position, step) for d in (drafter, earlier))
        expected += 0.5 * weights[step] * float(forgetting_guard(now, then))
    assert extra == pytest.approx(expected, rel=1e-3)
    assert extra > 0


@pytest.mark.parametrize("kind", KINDS)
def test_training_unlearns_what_was_refused_and_keeps_what_is_guarded(
    kind: str, frozen: FrozenTarget, draft_ids: torch.Tensor
) -> None:
    drafter, target = _drafter(kind, frozen, draft_ids)
    record = _record(kind, 16, 3, 1)
    wrong = int(_logits(drafter, target, collate([record], 64, "cpu"), 0, 5, 0).argmax())
    record = _refuse(record, 6, 0, int(drafter.draft_ids()[wrong]))
    refused, kept = [], []
    for lessons in (LessonSettings(), LessonSettings(refused_weight=20.0), LessonSettings(guard_weight=20.0)):
        drafter, target = _drafter(kind, frozen, draft_ids)
        earlier, _ = _drafter(kind, frozen, draft_ids)
        trainer = OnlineTrainer(drafter, target, dataclasses.replace(SETTINGS, lessons=lessons), seed=0)
        trainer.guard(earlier)
        batch = collate([record], 64, "cpu", replayed=lambda record: True)
        for _ in range(5):
            trainer.step(batch)
        logits = _logits(drafter, target, batch, 0, 5, 0)
        refused.append(float(logits.softmax(-1)[0, wrong]))
        kept.append(float(forgetting_guard(logits, _logits(earlier, target, batch, 0, 5, 0))))
    assert refused[1] < 0.7 * refused[0]
    assert kept[2] < 0.5 * kept[0]
