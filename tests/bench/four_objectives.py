"""What each objective brings: EAGLE-3 drafters trained on equal tokens, scored by the accepted length of a chain.

The stages of `four_systems.py` that are about training, not about systems:

    objective ...   half of the answers, one divergence each
    refused ...     a drafter of the first half serves the second; its refused drafts are unlearned, or not
    replay ...      a drafter of one domain is trained on the other: alone, with replayed records, and guarded
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from draftloop.core.records import CaptureRecord, VerifyStep
from draftloop.drafters.batch import collate
from draftloop.drafters.eagle3 import Eagle3Drafter
from draftloop.drafters.lessons import LessonSettings
from draftloop.drafters.objectives import DIVERGENCES
from draftloop.drafters.online import OnlineSettings, OnlineTrainer

if TYPE_CHECKING:
    from four_systems import Answer, Bench

STEPS = 3


def objective_stages(bench: Bench) -> dict[str, Callable[[], Any]]:
    half = bench.train[: len(bench.train) // 2]
    stages: dict[str, Callable[[], Any]] = {
        f"objective {name}": partial(of_divergence, bench, half, name) for name in DIVERGENCES
    }
    return {**stages, "refused drafts": partial(of_refused_drafts, bench), "replay": partial(of_replay, bench)}


def settings(bench: Bench, records: Sequence[Any], **changes: Any) -> OnlineSettings:
    return dataclasses.replace(bench.settings(records, STEPS), **changes)


def records_of(drafter: Eagle3Drafter, answers: Sequence[Answer]) -> list[CaptureRecord]:
    return [answer.record(drafter.shape.layer_ids) for answer in answers]


def of_divergence(bench: Bench, answers: Sequence[Answer], divergence: Any) -> dict[str, Any]:
    drafter, plain = bench.new_eagle3(), settings(bench, answers)
    bench.fit(drafter, dataclasses.replace(plain, ttt=dataclasses.replace(plain.ttt, divergence=divergence)),
              records_of(drafter, answers))  # fmt: skip
    return bench.chain(drafter)


def continued(
    bench: Bench, first: Eagle3Drafter, records: Sequence[CaptureRecord], lessons: LessonSettings, old: frozenset[str]
) -> Eagle3Drafter:
    """A copy of the first drafter, trained on; records of the domains `old` count as replayed."""
    drafter = bench.new_eagle3()
    drafter.load_state_dict(first.state_dict())
    trainer = OnlineTrainer(drafter, bench.small, settings(bench, records, lessons=lessons), bench.args.seed)
    trainer.guard(first)
    for place in torch.randperm(len(records), generator=trainer.generator).tolist():
        batch = collate([records[place]], 1024, "cpu", trainer.generator, replayed=lambda record: record.domain in old)
        trainer.step(batch)
    drafter.load_state_dict(trainer.candidate_state_dict())
    return drafter


def of_refused_drafts(bench: Bench) -> dict[str, Any]:
    half = len(bench.train) // 2
    first = bench.new_eagle3()
    bench.fit(first, settings(bench, range(half)), records_of(first, bench.train[:half]))
    served = [as_served(bench, first, record) for record in records_of(first, bench.train[half:])]
    found: dict[str, Any] = {"before": bench.chain(first)}
    for weight in (0.0, 0.3, 1.0):
        drafter = continued(bench, first, served, LessonSettings(refused_weight=weight), frozenset())
        found[f"weight {weight}"] = bench.chain(drafter)
    return found


@torch.no_grad()
def as_served(bench: Bench, drafter: Eagle3Drafter, record: CaptureRecord) -> CaptureRecord:
    """The record with the verifications of a chain that the drafter would have drawn: greedy, so its own tokens are
    what the target said."""
    batch = collate([record], 1024, "cpu")
    roots = torch.arange(record.prompt_len, record.num_tokens - STEPS)
    features = drafter.guess(batch, bench.small, roots[None] - 1, STEPS)
    best = [drafter.draft_ids()[drafter.guess_logits(feature[0], bench.small).argmax(-1)] for feature in features]
    chains, steps, root = torch.stack(best, 1).numpy().astype(np.int32), [], record.prompt_len
    while root < record.num_tokens - STEPS:
        drafts = chains[root - record.prompt_len]
        right = drafts == record.token_ids[root + 1 : root + 1 + STEPS]
        accepted = int(np.cumprod(right).sum())
        steps.append(VerifyStep(root, drafts, np.arange(STEPS, dtype=np.int32), accepted, "first"))
        root += accepted + 1
    return dataclasses.replace(record, verify_steps=tuple(steps))


def of_replay(bench: Bench) -> dict[str, Any]:
    """Trained on chat, then on code: what is left of chat."""
    parts = {name: [a for a in bench.train if a.domain == name] for name in ("chat", "code")}
    tests = {name: [a for a in bench.test if a.domain == name] for name in parts}
    first = bench.new_eagle3()
    bench.fit(first, settings(bench, parts["chat"]), records_of(first, parts["chat"]))
    new, old = records_of(first, parts["code"]), records_of(first, parts["chat"])
    mixed = [*new[: len(new) // 2], *old[: len(new) - len(new) // 2]]
    cases = {
        "new domain only": (new, LessonSettings()),
        "half replayed": (mixed, LessonSettings()),
        "half replayed, guarded": (mixed, LessonSettings(guard_weight=1.0)),
    }
    drafters = {"before": first} | {
        name: continued(bench, first, records, lessons, frozenset({"chat"}))
        for name, (records, lessons) in cases.items()
    }
    return {name: {d: bench.chain(drafter, tests[d]) for d in tests} for name, drafter in drafters.items()}
