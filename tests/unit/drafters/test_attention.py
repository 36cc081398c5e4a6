"""The attention the drafters train with, against the written-out masks in three implementations."""

from __future__ import annotations

import pytest
import torch

from draftloop.drafters import prefix_attention as module
from draftloop.drafters.attention_forms import Form, Rule, block_rule, masked_attention, ttt_rule
from draftloop.drafters.dflash import block_attention
from draftloop.drafters.prefix_attention import prefix_attention
from draftloop.drafters.recurrent import ttt_attention

from . import oracle
from .test_dflash import block_mask

LENGTH, STEPS, DIM = 9, 3, 8
ANCHORS, BLOCK = [1, 4, 4, 8], 3


def _table(rule: Rule, queries: int, keys: int) -> torch.Tensor:
    return rule(torch.arange(queries)[:, None], torch.arange(keys)[None])


def test_rules_are_the_loop_oracles() -> None:
    last = oracle.tree_mask(LENGTH, STEPS)[-LENGTH:]
    assert torch.equal(_table(ttt_rule(LENGTH), LENGTH, STEPS * LENGTH), last)
    slots = len(ANCHORS) * BLOCK
    rule = block_rule(torch.tensor(ANCHORS), BLOCK, LENGTH)
    assert torch.equal(_table(rule, slots, LENGTH + slots), block_mask(LENGTH, ANCHORS, BLOCK))


def _tensors(dtype: torch.dtype, *sizes: tuple[int, int]) -> list[torch.Tensor]:
    """Leaves [2, heads, rows, D], one for each (heads, rows)."""
    return [
        torch.randn(2, heads, rows, DIM, dtype=dtype, requires_grad=dtype == torch.float64) for heads, rows in sizes
    ]


@pytest.fixture(params=[1, 40, 1 << 22])
def strip(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STRIP_SCORES", request.param * 2 * 4)


def _ttt_both(inputs: list[torch.Tensor], form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    query, *rest = inputs
    keys, values = rest[:STEPS], rest[STEPS:]
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    fast = ttt_attention(query, torch.zeros_like(positions), positions, (keys[0], values[0]), keys[1:], values[1:])
    return fast, masked_attention(query, torch.cat(keys, 2), torch.cat(values, 2), ttt_rule(LENGTH), form)


def _block_both(inputs: list[torch.Tensor], form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, own_key, own_value = inputs
    seen = torch.tensor(ANCHORS).repeat_interleave(BLOCK).expand(2, -1)
    fast = block_attention(query, (torch.zeros_like(seen), seen), (key, value), (own_key, own_value), BLOCK)
    rule = block_rule(torch.tensor(ANCHORS), BLOCK, LENGTH)
    return fast, masked_attention(query, torch.cat((key, own_key), 2), torch.cat((value, own_value), 2), rule, form)


CASES = {
    "ttt": (_ttt_both, [(4, LENGTH), *[(2, LENGTH)] * (2 * STEPS)]),
    "dflash": (_block_both, [(4, 4 * BLOCK), (2, LENGTH), (2, LENGTH), (2, 4 * BLOCK), (2, 4 * BLOCK)]),
}


@pytest.mark.usefixtures("strip")
@pytest.mark.parametrize("form", ["eager", "sdpa"])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward_agree_in_fp64(case: str, form: Form) -> None:
    both, sizes = CASES[case]
    inputs = _tensors(torch.float64, *sizes)
    fast, slow = both(inputs, form)
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)
    weights = torch.randn_like(slow)
    one, two = (torch.autograd.grad((out * weights).sum(), inputs) for out in (fast, slow))
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_flex_attention_agrees_forward(case: str) -> None:
    both, sizes = CASES[case]
    with torch.no_grad():
        fast, slow = both(_tensors(torch.float32, *sizes), "flex")
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)


def test_the_log_sum_exp_has_a_gradient_too() -> None:
    query, key, value = _tensors(torch.float64, (4, 5), (2, LENGTH), (2, LENGTH))
    visible = torch.tensor([[1, 3, 9, 2, 5], [9, 1, 1, 4, 7]])
    first = torch.tensor([[0, 2, 0, 1, 0], [3, 0, 0, 0, 6]])
    assert torch.autograd.gradcheck(lambda q, k, v: prefix_attention(q, first, visible, k, v), (query, key, value))


def test_half_precision_stays_near_single() -> None:
    query, key, value = _tensors(torch.float32, (4, 5), (2, LENGTH), (2, LENGTH))
    first, visible = torch.zeros(2, 5, dtype=torch.int64), torch.full((2, 5), LENGTH)
    single, _ = prefix_attention(query, first, visible, key, value)
    half, norm = prefix_attention(query.bfloat16(), first, visible, key.bfloat16(), value.bfloat16())
    assert half.dtype == torch.bfloat16
    assert norm.dtype == torch.float32
    torch.testing.assert_close(half.float(), single, rtol=0.05, atol=0.05)
