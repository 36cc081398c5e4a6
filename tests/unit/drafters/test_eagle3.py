"""The drafter's forward pass and loss against slow oracles."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from draftloop.core.errors import ConfigError
from draftloop.drafters.batch import Batch, collate
from draftloop.drafters.eagle3 import Eagle3Config, Eagle3Drafter, default_layer_ids
from draftloop.drafters.eagle3_loss import TttSettings, eagle3_loss, unroll_from
from draftloop.drafters.recurrent import step_embeddings
from draftloop.drafters.target import FrozenTarget

from . import oracle
from .conftest import HIDDEN, TINY, VOCAB, make_record

STEPS = 3


def every_position(batch: int, length: int) -> torch.Tensor:
    return torch.arange(length).expand(batch, length)


def test_attention_agrees_with_the_dense_tree_mask_forward_and_backward(drafter: Eagle3Drafter) -> None:
    drafter.double()
    fused = torch.randn(2, 7, 3 * HIDDEN, dtype=torch.float64)
    embeddings = torch.randn(2, 7 + STEPS - 1, HIDDEN, dtype=torch.float64)
    weights = torch.randn(STEPS, 2, 7, HIDDEN, dtype=torch.float64)

    fast = torch.stack(drafter(fused, embeddings, every_position(2, 7), STEPS))
    (fast * weights).sum().backward()
    fast_grads = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    rows = [torch.stack(oracle.unroll(drafter, fused[b], embeddings[b], STEPS)) for b in range(2)]
    slow = torch.stack(rows, dim=1)
    (slow * weights).sum().backward()

    # The rope tables are fp32 in the drafter.
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-6)
    assert set(fast_grads) == {n for n, _ in drafter.named_parameters()} - {"norm.weight", "lm_head.weight"}
    for name, grad in fast_grads.items():
        torch.testing.assert_close(grad, dict(drafter.named_parameters())[name].grad, rtol=1e-4, atol=1e-5)


def test_a_subset_of_positions_gives_the_rows_of_the_full_unroll(drafter: Eagle3Drafter) -> None:
    fused, embeddings = torch.randn(2, 9, 3 * HIDDEN), torch.randn(2, 9 + STEPS - 1, HIDDEN)
    positions = torch.tensor([[1, 4, 8], [7, 2, 0]])
    some = drafter(fused, embeddings, positions, STEPS)
    every = drafter(fused, embeddings, every_position(2, 9), STEPS)
    for few, many in zip(some, every, strict=True):
        torch.testing.assert_close(few, torch.stack([many[b, positions[b]] for b in range(2)]))


def test_a_padded_batch_equals_one_sequence_at_a_time(drafter: Eagle3Drafter, frozen: FrozenTarget) -> None:
    records = [make_record(n, 3, seed) for seed, n in enumerate((9, 5, 12))]
    together = collate(records, 64, "cpu")
    embeddings = step_embeddings(together, frozen.embedding, STEPS)
    padded = drafter(together.fused, embeddings, every_position(3, 12), STEPS)
    for row, record in enumerate(records):
        alone = collate([record], 64, "cpu")
        size = record.num_tokens
        embeddings = step_embeddings(alone, frozen.embedding, STEPS)
        single = drafter(alone.fused, embeddings, every_position(1, size), STEPS)
        for step in range(STEPS):
            # Past size - 1 - step the token inputs are padding on both sides.
            torch.testing.assert_close(padded[step][row, : size - 1 - step], single[step][0, : size - 1 - step])


def test_loss_shifts_against_a_loop(drafter: Eagle3Drafter, frozen: FrozenTarget) -> None:
    records = [make_record(9, 4, 1), make_record(6, 2, 2), make_record(3, 30, 3), make_record(7, 1, 4)]
    settings = TttSettings(steps=STEPS, decay=0.7)
    result = eagle3_loss(drafter, collate(records, 64, "cpu"), frozen, settings)
    expected, counted = _loop_loss(drafter, frozen, records, settings)
    torch.testing.assert_close(result.loss, expected, rtol=1e-4, atol=1e-5)
    assert result.positions == counted


def _loop_loss(drafter, frozen, records, settings):  # type: ignore[no-untyped-def]
    ids = drafter.draft_ids()
    sums, counts = [torch.zeros(()) for _ in range(STEPS)], [0] * STEPS
    for record in records:
        x = torch.from_numpy(record.token_ids).long()
        embedded = F.embedding(torch.cat((x[1:], torch.zeros(STEPS, dtype=torch.int64))), frozen.embedding)
        features = oracle.unroll(drafter, torch.from_numpy(record.fused), embedded, STEPS)
        for step in range(STEPS):
            for t in range(record.num_tokens):
                teacher = t + 1 + step
                if teacher >= record.num_tokens:
                    continue
                # A position is unrolled when its first row teaches.
                if t + 1 < record.prompt_len - 1:
                    continue
                full = torch.from_numpy(record.last_hidden[teacher]) @ frozen.lm_head.T
                p = full.softmax(-1)[ids]
                q = oracle.logits(drafter, features[step][t]).log_softmax(-1)
                sums[step] = sums[step] - (p / p.sum() * q).sum()
                counts[step] += 1
    weights = [settings.decay**step for step in range(STEPS)]
    means = [w * s / c for w, s, c in zip(weights, sums, counts, strict=True)]
    return torch.stack(means).sum() / sum(weights), sum(counts)


def test_unroll_from_picks_contiguous_and_scattered_rows() -> None:
    teaches = torch.tensor([[False, False, True, True, True], [True, True, False, False, False]])
    ends = torch.tensor([[5] * 5, [2, 2, 5, 5, 5]])
    unrolled = unroll_from(teaches, ends, 2)
    assert unrolled.positions.tolist() == [[1, 2, 3], [0, 0, 0]]
    assert unrolled.taught[0].tolist() == [[True, True, True], [True, False, False]]
    assert unrolled.taught[1].tolist() == [[True, True, False], [False, False, False]]
    assert unrolled.row[0, 0].tolist() == [2, 3, 4]


def test_unrolling_stops_where_a_packed_record_ends() -> None:
    unrolled = unroll_from(torch.ones(1, 5, dtype=torch.bool), torch.tensor([[3, 3, 3, 5, 5]]), 3)
    assert unrolled.positions.tolist() == [[0, 1, 3]]
    assert unrolled.taught[:, 0].tolist() == [[True, True, True], [True, False, False], [False, False, False]]


def test_batches_that_teach_nothing_have_zero_loss(drafter: Eagle3Drafter, frozen: FrozenTarget) -> None:
    batch = collate([make_record(5, 50, 0)], 64, "cpu")
    result = eagle3_loss(drafter, batch, frozen, TttSettings())
    assert result.positions == 0
    assert float(result.loss.detach()) == 0.0


def test_collate_marks_generated_rows_by_absolute_position() -> None:
    batch = collate([make_record(5, 12, 0, start=9), make_record(3, 2, 1)], 64, "cpu")
    assert batch.generated.tolist() == [[False, False, True, True, True], [False, True, True, False, False]]
    assert batch.lengths.tolist() == [5, 3]


def test_collate_crops_to_the_end_or_by_the_generator() -> None:
    record = make_record(20, 4, 0)
    end = collate([record], 8, "cpu")
    assert end.token_ids[0].tolist() == record.token_ids[12:].tolist()
    draws = {_crop_begin(record, collate([record], 8, "cpu", torch.Generator().manual_seed(s))) for s in range(40)}
    assert len(draws) > 5
    assert draws <= set(range(13))


def _crop_begin(record, batch: Batch) -> int:  # type: ignore[no-untyped-def]
    return next(b for b in range(13) if (record.fused[b : b + 8] == batch.fused[0].numpy()).all())


@pytest.mark.parametrize(("layers", "expected"), [(30, (1, 14, 26)), (32, (1, 15, 28)), (4, (0, 1, 2)), (7, (1, 2, 3))])
def test_default_layer_ids(layers: int, expected: tuple[int, ...]) -> None:
    assert default_layer_ids(layers) == expected


def test_default_layer_ids_are_distinct_inner_layers() -> None:
    for layers in range(4, 100):
        ids = default_layer_ids(layers)
        assert sorted(set(ids)) == list(ids)
        assert ids[0] >= 0
        assert ids[-1] <= layers - 2
    with pytest.raises(ConfigError, match="too few"):
        default_layer_ids(3)


def test_config_follows_the_target_and_refuses_what_sglang_cannot_serve() -> None:
    target = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 50,
        "num_hidden_layers": 8,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_theta": 5e5},
    }
    config = Eagle3Config.for_target(target, 20)
    assert (config.head_dim, config.num_kv_heads, config.rope_theta, config.layer_ids) == (16, 4, 5e5, (1, 3, 4))
    with pytest.raises(ConfigError, match="two fused layers"):
        dataclasses.replace(TINY, layer_ids=(1,))
    with pytest.raises(ConfigError, match="draft vocabulary"):
        dataclasses.replace(TINY, draft_vocab_size=VOCAB + 1)


def test_untrained_is_reproducible_and_leaves_the_global_generator_alone(draft_ids: torch.Tensor) -> None:
    head, norm = torch.randn(VOCAB, HIDDEN), torch.rand(HIDDEN)
    before = torch.get_rng_state()
    one, two = (Eagle3Drafter.untrained(TINY, draft_ids, head, norm, seed=7) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, two.state_dict()[name]), name
    assert torch.equal(one.lm_head.weight, head[draft_ids])
    assert torch.equal(one.norm.weight, norm)
    assert torch.equal(one.draft_ids(), draft_ids)


def test_the_last_layer_lands_on_the_feature_half(draft_ids: torch.Tensor) -> None:
    head = torch.randn(VOCAB, HIDDEN)
    layer = {
        "self_attn.q_proj.weight": torch.randn(24, HIDDEN),
        "self_attn.o_proj.weight": torch.randn(HIDDEN, 24),
        "input_layernorm.weight": torch.rand(HIDDEN),
        "mlp.up_proj.weight": torch.randn(99, HIDDEN),
        "self_attn.q_proj.bias": torch.randn(24),
    }
    lens = Eagle3Drafter.untrained(TINY, draft_ids, head, None, seed=7).midlayer
    mid = Eagle3Drafter.untrained(TINY, draft_ids, head, None, seed=7, last_layer=layer).midlayer
    assert torch.equal(mid.self_attn.q_proj.weight[:, HIDDEN:], layer["self_attn.q_proj.weight"])
    assert torch.equal(mid.self_attn.q_proj.weight[:, :HIDDEN], lens.self_attn.q_proj.weight[:, :HIDDEN])
    assert torch.equal(mid.self_attn.o_proj.weight, layer["self_attn.o_proj.weight"])
    assert torch.equal(mid.hidden_norm.weight, layer["input_layernorm.weight"])
    assert torch.equal(mid.input_layernorm.weight, torch.ones(HIDDEN))
    # Another width: random, as before.
    assert torch.equal(mid.mlp.up_proj.weight, lens.mlp.up_proj.weight)
