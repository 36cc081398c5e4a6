"""The arguments made for FlashInfer, read by a loop that does what FlashInfer says it does, give tree attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.attention.paging import (
    masked_arguments,
    node_slots,
    prefix_arguments,
    slots_of,
    tree_arguments,
    visible_mask,
)
from draftloop.attention.torch_cascade import TorchCascadeAttention

from .by_hand import random_case
from .prefill_by_hand import merge, prefill

CASES = {
    "seed": st.integers(0, 2**32 - 1),
    "prefixes": st.lists(st.integers(0, 9), min_size=1, max_size=3),
    "nodes": st.integers(1, 5),
    "kv_heads": st.integers(1, 2),
    "group": st.integers(1, 3),
    "page_size": st.sampled_from([1, 2, 4, 16]),
    "chain": st.booleans(),
    "padding": st.integers(0, 2),
}
TOLERANCE = 3e-5


@settings(deadline=None, max_examples=50)
@given(**CASES)
def test_prefix_and_tree_merged_are_tree_attention(**kwargs: object) -> None:
    case = random_case(**kwargs)  # type: ignore[arg-type]
    tree = prefill(tree_arguments(case.batch), case.query, case.keys, case.values, case.scale)
    prefix = prefill(prefix_arguments(case.batch), case.query, case.keys, case.values, case.scale)
    torch.testing.assert_close(merge(*tree, *prefix), case.expected(), rtol=0, atol=TOLERANCE)


@settings(deadline=None, max_examples=50)
@given(**CASES)
def test_one_masked_prefill_is_tree_attention(**kwargs: object) -> None:
    case = random_case(**kwargs)  # type: ignore[arg-type]
    out, _ = prefill(masked_arguments(case.batch), case.query, case.keys, case.values, case.scale)
    torch.testing.assert_close(out, case.expected(), rtol=0, atol=TOLERANCE)


@settings(deadline=None, max_examples=50)
@given(**CASES)
def test_the_torch_cascade_is_tree_attention(**kwargs: object) -> None:
    case = random_case(**kwargs)  # type: ignore[arg-type]
    attention = TorchCascadeAttention()
    attention.plan(case.batch)
    out = attention.run(case.query, case.keys, case.values, case.scale)
    torch.testing.assert_close(out, case.expected(), rtol=0, atol=TOLERANCE)


@settings(deadline=None, max_examples=50)
@given(**CASES)
def test_slots_by_pages(**kwargs: object) -> None:
    """Position p of a request lies in slot g * page[p // g] + p % g; the nodes are the last N positions."""
    case = random_case(**kwargs)  # type: ignore[arg-type]
    batch = case.batch
    slots, nodes, mask = slots_of(batch), node_slots(batch), visible_mask(batch, slots_of(batch).shape[1])
    for request, length in enumerate(batch.kv_lens.tolist()):
        assert nodes[request].tolist() == slots[request, length - batch.num_nodes : length].tolist()
        for node in range(batch.num_nodes):
            assert slots[request][mask[request, node]].tolist() == case.visible(request, node)


def test_the_drawing_of_the_arguments() -> None:
    """Prefixes 5 and 0, two nodes, pages of four."""
    case = random_case(0, [5, 0], 2, 1, 1, 4, chain=False, padding=0)
    prefix, tree, masked = prefix_arguments(case.batch), tree_arguments(case.batch), masked_arguments(case.batch)
    assert (prefix.kv_indptr.tolist(), prefix.last_page_len.tolist(), len(prefix.kv_indices)) == ([0, 2, 2], [1, 0], 2)
    assert (tree.kv_indptr.tolist(), tree.last_page_len.tolist(), tree.page_size) == ([0, 2, 4], [1, 1], 1)
    assert (masked.kv_indptr.tolist(), masked.last_page_len.tolist()) == ([0, 2, 3], [3, 2])
    assert prefix.packed_mask is None
    assert tree.mask_indptr is not None
    assert tree.mask_indptr.tolist() == [0, 1, 2]
    assert masked.mask_indptr is not None
    assert masked.mask_indptr.tolist() == [0, 2, 3]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flashinfer_leaves_the_offsets_of_a_given_packed_mask_in_bits() -> None:
    """Why `_Wrapper.plan` writes them again: the kernel adds them to a byte pointer (`variants.cuh`), and `plan` makes
    them by this function when it is given a packed mask alone. The GPU tests show what comes of it."""
    from flashinfer.prefill import _compute_page_mask_indptr

    case = random_case(0, [5, 0], 2, 1, 1, 4, chain=False, padding=0)
    masked = masked_arguments(case.batch)
    theirs = _compute_page_mask_indptr(masked.qo_indptr, masked.kv_indptr, masked.last_page_len, masked.page_size)
    assert theirs.tolist() == [0, 14, 18]
    assert masked.mask_indptr is not None
    assert masked.mask_indptr.tolist() == [0, 2, 3]
