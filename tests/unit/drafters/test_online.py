"""The online trainer: exact resume, averaged candidate, and that it learns a real (tiny) target."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from draftloop.core.records import CaptureRecord
from draftloop.drafters.batch import collate
from draftloop.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftloop.drafters.metrics import expected_accepted_length, prepare_holdout
from draftloop.drafters.online import OnlineSettings, OnlineTrainer, StepReport
from draftloop.drafters.target import FrozenTarget

from .conftest import TINY, make_record

SETTINGS = OnlineSettings(warmup_steps=3, ema_decay=0.9)
RECORDS = [make_record(20, 5, seed) for seed in range(6)]


def _trainer(draft_ids: torch.Tensor, frozen: FrozenTarget) -> OnlineTrainer:
    drafter = Eagle3Drafter.untrained(TINY, draft_ids, frozen.lm_head, None, seed=0)
    return OnlineTrainer(drafter, frozen, SETTINGS, seed=5)


def _steps(trainer: OnlineTrainer, count: int) -> list[StepReport]:
    reports = []
    for _ in range(count):
        pick = torch.randperm(len(RECORDS), generator=trainer.generator)[:2].tolist()
        reports.append(trainer.step(collate([RECORDS[i] for i in pick], 12, "cpu", trainer.generator)))
    return reports


def test_resume_is_bit_exact(draft_ids: torch.Tensor, frozen: FrozenTarget) -> None:
    unbroken = _trainer(draft_ids, frozen)
    _steps(unbroken, 4)
    file = io.BytesIO()
    torch.save(unbroken.state_dict(), file)
    expected = _steps(unbroken, 5)

    resumed = _trainer(draft_ids, frozen)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert _steps(resumed, 5) == expected
    for name, tensor in unbroken.candidate_state_dict().items():
        assert torch.equal(resumed.candidate_state_dict()[name], tensor), name
    for name, tensor in unbroken.drafter.state_dict().items():
        assert torch.equal(resumed.drafter.state_dict()[name], tensor), name


def test_loading_copies_the_saved_state(draft_ids: torch.Tensor, frozen: FrozenTarget) -> None:
    first, second = _trainer(draft_ids, frozen), _trainer(draft_ids, frozen)
    _steps(first, 2)
    second.load_state_dict(first.state_dict())
    before = first.candidate_state_dict()
    _steps(second, 2)
    assert all(torch.equal(first.candidate_state_dict()[name], tensor) for name, tensor in before.items())


def test_warm_up_then_constant(draft_ids: torch.Tensor, frozen: FrozenTarget) -> None:
    rates = [report.learning_rate for report in _steps(_trainer(draft_ids, frozen), 5)]
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3, 1e-3])


def test_batches_that_teach_nothing_or_hold_nan_touch_no_weight(draft_ids: torch.Tensor, frozen: FrozenTarget) -> None:
    drafter = Eagle3Drafter.untrained(TINY, draft_ids, frozen.lm_head, None, seed=0)
    trainer = OnlineTrainer(drafter, frozen, OnlineSettings(), seed=0)
    before = trainer.drafter.state_dict()["fc.weight"].clone()
    prompt_only, broken = make_record(6, 50, 0), make_record(6, 2, 0)
    broken.fused[3] = np.nan
    for record in (prompt_only, broken):
        report = trainer.step(collate([record], 12, "cpu"))
        assert report.skipped
        assert report.step == 0
    assert torch.equal(trainer.drafter.fc.weight, before)
    assert not trainer.step(collate([make_record(6, 2, 0)], 12, "cpu")).skipped
    assert torch.isfinite(trainer.drafter.fc.weight).all()


def test_the_candidate_is_a_copy_of_the_average(draft_ids: torch.Tensor, frozen: FrozenTarget) -> None:
    trainer = _trainer(draft_ids, frozen)
    start = trainer.drafter.fc.weight.detach().clone()
    _steps(trainer, 1)
    # After one step the ramp's decay is 2/11.
    expected = torch.lerp(start, trainer.drafter.fc.weight.detach(), 1 - 2 / 11)
    torch.testing.assert_close(trainer.candidate_state_dict()["fc.weight"], expected)
    trainer.candidate_state_dict()["fc.weight"].zero_()
    assert trainer.candidate_state_dict()["fc.weight"].abs().sum() > 0


def test_training_raises_the_accepted_length_of_a_real_target() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {
        "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128, "initializer_range": 0.2,
        "rms_norm_eps": 1e-6,
    }  # fmt: skip
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**shape, bos_token_id=None, eos_token_id=None)
    ).eval()
    ids = torch.arange(64)
    config = Eagle3Config.for_target(shape, 64)
    records = _greedy_records(model, config.layer_ids)
    frozen = FrozenTarget.of(model.model.embed_tokens.weight, model.lm_head.weight, ids)
    drafter = Eagle3Drafter.untrained(config, ids, frozen.lm_head, model.model.norm.weight, seed=0)
    trainer = OnlineTrainer(drafter, frozen, OnlineSettings(learning_rate=5e-3), seed=0)
    holdout = prepare_holdout(records, frozen, 128, "cpu")
    before = expected_accepted_length(drafter, holdout, frozen, (1, 1, 1)).accept_length
    batch = collate(records, 128, "cpu")
    for _ in range(250):
        report = trainer.step(batch)
    after = expected_accepted_length(drafter, holdout, frozen, (1, 1, 1)).accept_length
    assert before < 1.6
    assert after > 3.0
    assert report.step_accuracy[0] > 0.8


@torch.no_grad()
def _greedy_records(model, layer_ids: tuple[int, ...]) -> list[CaptureRecord]:  # type: ignore[no-untyped-def]
    prompts = torch.randint(0, 64, (8, 6))
    tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=40, do_sample=False)
    states = model.model(tokens, output_hidden_states=True)
    # hidden_states[0] is the embedding, so the output of layer i is hidden_states[i + 1].
    fused = torch.cat([states.hidden_states[i + 1] for i in layer_ids], dim=-1)
    return [
        CaptureRecord(
            request_id=str(row),
            domain="tiny",
            start=0,
            prompt_len=6,
            token_ids=tokens[row].numpy().astype(np.int32),
            fused=fused[row].numpy(),
            last_hidden=states.last_hidden_state[row].numpy(),
        )
        for row in range(len(tokens))
    ]
