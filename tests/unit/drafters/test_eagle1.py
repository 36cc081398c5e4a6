"""EAGLE-1 against a slow oracle."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from draftloop.drafters.batch import collate
from draftloop.drafters.eagle1 import Eagle1Config, Eagle1Drafter, Eagle1Objective, Eagle1Settings
from draftloop.drafters.target import FrozenTarget

from . import oracle
from .conftest import EAGLE1, HIDDEN, make_record


def unroll(head: Eagle1Drafter, states: torch.Tensor, embeddings: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """states: [T, H].  embeddings: [T+steps-1, H].  The tree mask is materialised; one [T, H] a step."""
    c, w = head.config, dict(head.named_parameters())
    length, feature = states.shape[0], states
    mask = oracle.tree_mask(length, steps)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    features = []
    for j in range(steps):
        h = torch.cat((embeddings[j : j + length], feature), -1) @ w["fc.weight"].T + w["fc.bias"]
        q, k, v = (
            (h @ w[f"layers.0.self_attn.{n}_proj.weight"].T).view(length, -1, c.head_dim).transpose(0, 1) for n in "qkv"
        )
        now = torch.arange(length) + j
        keys.append(oracle.rope(k, now, c.rope_theta))
        values.append(v)
        repeat = c.num_heads // c.num_kv_heads
        key, value = (torch.cat(x, 1).repeat_interleave(repeat, 0) for x in (keys, values))
        scores = oracle.rope(q, now, c.rope_theta) @ key.transpose(1, 2) / math.sqrt(c.head_dim)
        allowed = mask[j * length : (j + 1) * length, : (j + 1) * length]
        attended = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value
        a = h + attended.transpose(0, 1).reshape(length, -1) @ w["layers.0.self_attn.o_proj.weight"].T
        y = oracle.rms(a, w["layers.0.post_attention_layernorm.weight"], c.rms_norm_eps)
        gate = F.silu(y @ w["layers.0.mlp.gate_proj.weight"].T) * (y @ w["layers.0.mlp.up_proj.weight"].T)
        feature = a + gate @ w["layers.0.mlp.down_proj.weight"].T
        features.append(feature)
    return features


def test_unroll_agrees_with_the_dense_tree_mask(eagle1: Eagle1Drafter) -> None:
    eagle1.double()
    states, embeddings = torch.randn(7, HIDDEN).double(), torch.randn(9, HIDDEN).double()
    fast = eagle1(states[None], embeddings[None], torch.arange(7)[None], 3)
    for one, two in zip(fast, unroll(eagle1, states, embeddings, 3), strict=True):
        torch.testing.assert_close(one[0], two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shifted", [True, False])
def test_loss_against_a_loop(eagle1: Eagle1Drafter, whole: FrozenTarget, shifted: bool) -> None:
    head = Eagle1Drafter(EAGLE1 if shifted else EAGLE1.without_shifted_token())
    head.load_state_dict(eagle1.state_dict())
    records = [make_record(9, 4, 1), make_record(6, 2, 2), make_record(3, 30, 3)]
    batch = collate(records, 64, "cpu")
    objective = Eagle1Objective(head, whole, Eagle1Settings(token_weight=0.3))
    plan = objective.plan(batch, torch.Generator().manual_seed(4))
    result = objective.loss(batch, plan.rows.unrolled, plan.rows.noise, plan.mass)

    total, count = torch.zeros(()), 0
    for b, record in enumerate(records):
        x, h = torch.from_numpy(record.token_ids).long(), torch.from_numpy(record.last_hidden)
        noise = plan.rows.noise[b, : len(x)]
        assert noise.abs().max() <= 0.1 * 512 / len(x)
        read = torch.cat((x[1:], x[:1])) if shifted else x
        (feature,) = unroll(head, h + noise, whole.embedding[read], 1)
        for t in range(len(x) - 1):
            if t + 1 >= record.prompt_len - 1:
                p = (h[t + 1] @ whole.lm_head.T).softmax(-1)
                q = (feature[t] @ whole.lm_head.T).log_softmax(-1)
                total = total + F.smooth_l1_loss(feature[t], h[t + 1]) - 0.3 * (p * q).sum()
                count += 1
    torch.testing.assert_close(result.loss, total / count, rtol=1e-4, atol=1e-5)
    assert int(plan.mass[0]) == count


def test_untrained_passes_the_feature_through() -> None:
    head = Eagle1Drafter.untrained(EAGLE1, seed=3)
    assert float(head.fc.weight.detach()[:, HIDDEN:].diagonal().mean()) == pytest.approx(1.0, abs=0.01)
    again = Eagle1Drafter.untrained(EAGLE1, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))


def test_the_names_are_those_sglang_loads(eagle1: Eagle1Drafter) -> None:
    attention = [f"layers.0.self_attn.{p}_proj.weight" for p in "qkvo"]
    mlp = [f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    expected = {"fc.weight", "fc.bias", "layers.0.post_attention_layernorm.weight", *attention, *mlp}
    assert set(eagle1.state_dict()) == expected


def test_config_follows_the_target() -> None:
    target = {
        "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 50,
        "num_hidden_layers": 8, "max_position_embeddings": 128,
    }  # fmt: skip
    config = Eagle1Config.for_target(target)
    assert (config.layer_ids, config.intermediate_size, config.shifted_token) == ((), 96, True)
    assert dataclasses.replace(config, shifted_token=False) == config.without_shifted_token()
