"""DFlash against a slow oracle: one block at a time, dense mask, plain loops."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from draftloop.core.errors import ConfigError
from draftloop.drafters import dflash_loss
from draftloop.drafters.batch import collate
from draftloop.drafters.dflash import DflashConfig, DflashDrafter, default_layer_ids
from draftloop.drafters.dflash_loss import DflashObjective, DflashSettings, draw_anchors
from draftloop.drafters.target import FrozenTarget

from . import oracle
from .conftest import BLOCK, DFLASH, VOCAB, make_record


def block_mask(context: int, anchors: list[int], size: int) -> torch.Tensor:
    """[A*N, T + A*N] bool: slot (b, n) sees context rows before its anchor, and the slots of its own block."""
    mask = torch.zeros(len(anchors) * size, context + len(anchors) * size, dtype=torch.bool)
    for block, anchor in enumerate(anchors):
        for slot in range(size):
            row = block * size + slot
            for t in range(context):
                mask[row, t] = t < anchor
            for other in range(size):
                mask[row, context + block * size + other] = True
    return mask


def blocks(drafter: DflashDrafter, fused: torch.Tensor, z: torch.Tensor, anchors: list[int]) -> torch.Tensor:
    """fused: [T, K*H].  z: [A*N, H] block embeddings.  Returns [A*N, H], all blocks under one dense mask."""
    c, w = drafter.config, dict(drafter.named_parameters())
    length, size = fused.shape[0], c.block_size
    states = oracle.rms(fused @ w["fc.weight"].T, w["hidden_norm.weight"], c.rms_norm_eps)
    now = torch.tensor([*range(length), *(a + n for a in anchors for n in range(size))])
    mask = block_mask(length, anchors, size)
    for i in range(c.num_layers):
        p = f"layers.{i}."
        x = oracle.rms(z, w[p + "input_layernorm.weight"], c.rms_norm_eps)
        both = torch.cat((states, x))

        def heads(name: str, inputs: torch.Tensor, p: str = p) -> torch.Tensor:
            flat = inputs @ w[f"{p}self_attn.{name}_proj.weight"].T
            return flat.view(len(inputs), -1, c.head_dim).transpose(0, 1)

        q = oracle.rms(heads("q", x), w[p + "self_attn.q_norm.weight"], c.rms_norm_eps)
        k = oracle.rms(heads("k", both), w[p + "self_attn.k_norm.weight"], c.rms_norm_eps)
        q, k = oracle.rope(q, now[length:], c.rope_theta), oracle.rope(k, now, c.rope_theta)
        repeat = c.num_heads // c.num_kv_heads
        k, v = k.repeat_interleave(repeat, 0), heads("v", both).repeat_interleave(repeat, 0)
        scores = (q @ k.transpose(1, 2) / math.sqrt(c.head_dim)).masked_fill(~mask, -torch.inf)
        z = z + (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(z), -1) @ w[p + "self_attn.o_proj.weight"].T
        y = oracle.rms(z, w[p + "post_attention_layernorm.weight"], c.rms_norm_eps)
        gate = F.silu(y @ w[p + "mlp.gate_proj.weight"].T) * (y @ w[p + "mlp.up_proj.weight"].T)
        z = z + gate @ w[p + "mlp.down_proj.weight"].T
    return z


def test_forward_and_backward_agree_with_the_dense_mask(dflash: DflashDrafter) -> None:
    dflash.double()
    fused = torch.randn(9, 2 * dflash.config.hidden_size, dtype=torch.float64)
    anchors = [1, 4, 5, 8]
    tokens, mask = torch.randn(4, dflash.config.hidden_size).double(), torch.randn(dflash.config.hidden_size).double()
    z = torch.stack([torch.stack([t, *[mask] * (BLOCK - 1)]) for t in tokens]).flatten(0, 1)
    weights = torch.randn(4 * BLOCK, dflash.config.hidden_size, dtype=torch.float64)

    def grads(out: torch.Tensor) -> dict[str, torch.Tensor]:
        dflash.zero_grad()
        (out * weights).sum().backward()
        return {n: p.grad.clone() for n, p in dflash.named_parameters() if p.grad is not None}

    fast = dflash(dflash.context(fused[None]), tokens[None], mask, torch.tensor([anchors]), torch.zeros(1, 4).long())[
        0
    ].flatten(0, 1)
    slow = blocks(dflash, fused, z, anchors)
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-6)  # the rope tables are fp32
    one, two = grads(fast), grads(slow)
    assert one.keys() == {n for n, _ in dflash.named_parameters()} - {"norm.weight"}
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5)


def test_loss_against_a_loop(dflash: DflashDrafter, whole: FrozenTarget) -> None:
    records = [make_record(12, 4, 1, layers=2), make_record(7, 1, 2, layers=2), make_record(3, 30, 3, layers=2)]
    batch = collate(records, 64, "cpu")
    objective = DflashObjective(dflash, whole, DflashSettings(anchors=4, gamma=2.0))
    plan = objective.plan(batch, torch.Generator().manual_seed(1))
    result = objective.loss(batch, plan.rows, plan.mass)

    total, weight_sum, count = torch.zeros(()), 0.0, 0
    for b, record in enumerate(records):
        x = record.token_ids.tolist()
        for a in plan.rows.positions[b][plan.rows.taught[b].any(-1)].tolist():
            ids = torch.tensor([x[a], *[dflash.config.mask_token_id] * (BLOCK - 1)])
            z = blocks(dflash, torch.from_numpy(record.fused), whole.embedding[ids], [a])
            logits = oracle.rms(z, dflash.norm.weight, dflash.config.rms_norm_eps) @ whole.lm_head.T
            for k in range(1, BLOCK):
                if a + k < len(x) and record.start + a + k >= record.prompt_len:
                    weight = math.exp(-(k - 1) / 2.0)
                    total = total - weight * logits[k].log_softmax(-1)[x[a + k]]
                    weight_sum, count = weight_sum + weight, count + 1
    torch.testing.assert_close(result.loss, total / weight_sum, rtol=1e-4, atol=1e-5)
    assert float(plan.mass[0]) == pytest.approx(weight_sum)
    assert int(result.counts.sum()) == count


def test_anchors_are_distinct_sorted_eligible_and_redrawn() -> None:
    records = [make_record(30, 10, 1), make_record(14, 1, 2), make_record(5, 40, 3)]
    batch = collate(records, 64, "cpu")
    seen = set()
    for seed in range(30):
        anchors = draw_anchors(batch, 4, 6, torch.Generator().manual_seed(seed))
        for row, record in enumerate(records):
            mine = anchors.positions[row][anchors.taught[row].any(-1)].tolist()
            legal = [a for a in range(1, record.num_tokens - 1) if a + 1 >= record.prompt_len]
            assert mine == sorted(set(mine))
            assert set(mine) <= set(legal)
            assert len(mine) == min(6, len(legal))
            seen.add((row, *mine))
        assert not anchors.taught[..., 0].any()
    assert len(seen) > 20


def test_segments_give_the_whole_gradient(
    dflash: DflashDrafter, whole: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = collate([make_record(20, 4, 1, layers=2), make_record(15, 1, 2, layers=2)], 64, "cpu")
    objective = DflashObjective(dflash, whole, DflashSettings(anchors=8))
    plan = objective.plan(batch, torch.Generator().manual_seed(0))
    losses, grads = [], []
    for slots in (1 << 20, 2 * BLOCK * 3):
        monkeypatch.setattr(dflash_loss, "_SEGMENT_SLOTS", slots)
        dflash.zero_grad()
        losses.append(objective.backward(batch, plan, plan.mass).loss)
        grads.append([p.grad.clone() for p in dflash.parameters()])
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)


def test_a_guess_is_the_block_serving_would_draft(dflash: DflashDrafter, whole: FrozenTarget) -> None:
    record = make_record(9, 2, 5, layers=2)
    batch = collate([record], 64, "cpu")
    guesses = dflash.guess(batch, whole, torch.tensor([[3, 6]]), 2)
    for column, t in enumerate((3, 6)):
        # Serving has seen rows 0..t, and drafts from the known token t+1.
        context = dflash.context(batch.fused[:, : t + 1])
        anchor = whole.embedding[batch.token_ids[:, t + 1]][None]
        block = dflash(
            context,
            anchor,
            whole.embedding[dflash.config.mask_token_id],
            torch.tensor([[t + 1]]),
            torch.zeros(1, 1).long(),
        )
        for step in range(2):
            torch.testing.assert_close(guesses[step][0, column], block[0, 0, 1 + step])
    with pytest.raises(ConfigError, match="guesses fewer than"):
        dflash.guess(batch, whole, torch.tensor([[3]]), BLOCK)


def test_context_grows_row_by_row(dflash: DflashDrafter) -> None:
    fused = torch.randn(1, 8, 2 * dflash.config.hidden_size)
    once = dflash.context(fused)
    grown = dflash.context(fused[:, :3]).extend(dflash.context(fused[:, 3:], start=3))
    torch.testing.assert_close(torch.stack(grown.keys), torch.stack(once.keys))
    torch.testing.assert_close(torch.stack(grown.values), torch.stack(once.values))


def test_layer_ids_are_sglangs() -> None:
    # `build_target_layer_ids` of SGLang 0.5.23, which serves where a config names none.
    sglangs = {
        (30, 5): (1, 8, 14, 20, 27), (36, 5): (1, 9, 17, 25, 33), (28, 6): (1, 6, 11, 15, 20, 25),
        (4, 2): (1, 1), (30, 1): (15,),
    }  # fmt: skip
    assert {shape: default_layer_ids(*shape) for shape in sglangs} == sglangs


def test_config_refusals() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        dataclasses.replace(DFLASH, block_size=1)
    with pytest.raises(ConfigError, match="mask token"):
        dataclasses.replace(DFLASH, mask_token_id=VOCAB)
    with pytest.raises(ConfigError, match="are not those of"):
        dataclasses.replace(DFLASH, layer_ids=(0, 9))
    with pytest.raises(ConfigError, match="too few"):
        default_layer_ids(3, 2)
    target = {
        "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 50,
        "num_hidden_layers": 8, "max_position_embeddings": 128,
    }  # fmt: skip
    config = DflashConfig.for_target(target, mask_token_id=3, num_layers=2, block_size=8)
    assert (config.layer_ids, config.num_target_layers, config.block_size) == ((1, 5), 8, 8)
