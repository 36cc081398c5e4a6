"""Torch tree attention equals attention written out with loops: ragged prefixes, tree masks, grouped heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.attention.interface import TreeBatch
from draftloop.attention.paging import visible_mask
from draftloop.attention.torch_backend import TorchTreeAttention, causal_extend, needed_mask

from .by_hand import ancestors, attend, random_case, random_parents

SLOTS = 64
TOLERANCE = 2e-5


def caches(rng: np.random.Generator, kv_heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (torch.from_numpy(rng.standard_normal((SLOTS, kv_heads, size))).float() for _ in range(2))
    return keys, values


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    prefixes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    nodes=st.integers(1, 6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    page_size=st.sampled_from([1, 2, 4, 16]),
    chain=st.booleans(),
    padding=st.integers(0, 3),
)
def test_tree_attention_equals_the_loop(**kwargs: object) -> None:
    case = random_case(**kwargs)  # type: ignore[arg-type]
    attention = TorchTreeAttention(case.query.shape[1], case.keys.shape[1], torch.float32)
    attention.plan(case.batch)
    got = attention.run(case.query, case.keys, case.values, case.scale)
    torch.testing.assert_close(got, case.expected(), rtol=0, atol=TOLERANCE)


def test_one_plan_serves_every_layer() -> None:
    rng = np.random.default_rng(3)
    batch = TreeBatch(torch.tensor([[5, 9, 2], [7, 0, 0]]), torch.tensor([3, 2]), 2, None)
    query = torch.from_numpy(rng.standard_normal((4, 2, 4))).float()
    attention = TorchTreeAttention(2, 1, torch.float32)
    attention.plan(batch)
    for _ in range(3):
        keys, values = caches(rng, 1, 4)
        fresh = TorchTreeAttention(2, 1, torch.float32)
        fresh.plan(batch)
        assert torch.equal(attention.run(query, keys, values, 0.5), fresh.run(query, keys, values, 0.5))


def test_the_drawing_of_the_mask() -> None:
    """Two siblings behind a prefix of three, one column of padding (`visible_mask`)."""
    siblings = torch.eye(2, dtype=torch.bool)[None]
    mask = visible_mask(TreeBatch(torch.zeros(1, 6, dtype=torch.int64), torch.tensor([5]), 2, siblings), 6)
    assert mask.int().tolist() == [[[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0]]]


def test_plain_decoding_of_equal_lengths_needs_no_mask() -> None:
    slots = torch.zeros(2, 4, dtype=torch.int64)
    assert needed_mask(TreeBatch(slots, torch.tensor([4, 4]), 1), 4) is None
    ragged = needed_mask(TreeBatch(slots, torch.tensor([4, 2]), 1), 4)
    assert ragged is not None
    assert ragged[:, 0].int().tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_running_without_a_plan_is_refused() -> None:
    with pytest.raises(RuntimeError, match="before plan"):
        TorchTreeAttention(2, 1, torch.float32).run(
            torch.zeros(1, 2, 4), torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), 1.0
        )


def test_half_precision_stays_close() -> None:
    rng = np.random.default_rng(7)
    keys, values = caches(rng, 2, 8)
    query = torch.from_numpy(rng.standard_normal((6, 4, 8))).float()
    mask = torch.stack([ancestors(random_parents(rng, 3)) for _ in range(2)])
    batch = TreeBatch(torch.from_numpy(rng.permutation(SLOTS)[:20].reshape(2, 10)), torch.tensor([10, 6]), 3, mask)
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        attention = TorchTreeAttention(4, 2, dtype)
        attention.plan(batch)
        outputs.append(attention.run(query.to(dtype), keys.to(dtype), values.to(dtype), 0.35).float())
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=0.05)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    cached=st.integers(0, 9),
    new=st.integers(1, 7),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
)
def test_causal_extend_equals_the_loop(seed: int, cached: int, new: int, kv_heads: int, group: int) -> None:
    """With and without a cached prefix: new token i sees all cached ones and new ones 0..i."""
    rng = np.random.default_rng(seed)
    size, heads, scale = 4, kv_heads * group, 0.6
    keys, values = caches(rng, kv_heads, size)
    slots = torch.from_numpy(rng.permutation(SLOTS)[: cached + new])
    query = torch.from_numpy(rng.standard_normal((new, heads, size))).float()
    got = causal_extend(query, keys, values, slots, scale)
    assert got.shape == query.shape
    for token in range(new):
        visible = slots[: cached + token + 1].tolist()
        for head in range(heads):
            kv = head // group
            expected = attend(
                query[token, head], [keys[s, kv] for s in visible], [values[s, kv] for s in visible], scale
            )
            torch.testing.assert_close(got[token, head], expected, rtol=0, atol=TOLERANCE)
