"""Layouts, masks and packed bits against loops; the drafters' own trees; SGLang's flat masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.attention.trees import ancestor_mask, lay_out, pack_segments, tree_block
from draftloop.drafters.tree import draft_tree

from .by_hand import ancestors, random_parents


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(st.integers(1, 64), min_size=1, max_size=5))
def test_a_layout_pads_trees_of_different_shapes(seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    trees = [random_parents(rng, size) for size in sizes]
    prefixes = torch.from_numpy(rng.integers(0, 1000, len(sizes)))
    layout = lay_out(trees, prefixes)
    widest = max(sizes)
    assert layout.mask.shape == (len(sizes), widest, widest)
    assert layout.sizes.tolist() == sizes
    for row, tree in enumerate(trees):
        padded = torch.cat((tree, torch.full((widest - len(tree),), -1)))
        assert layout.parents[row].tolist() == padded.tolist()
        assert torch.equal(layout.mask[row], ancestors(padded))
        for node in range(widest):
            depth, above = 0, int(padded[node])
            while above >= 0:
                depth, above = depth + 1, int(padded[above])
            assert int(layout.positions[row, node]) == int(prefixes[row]) + depth


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 33, 64])
def test_a_chain_is_lower_triangular(nodes: int) -> None:
    """The deepest tree there is: every doubling is needed."""
    mask = ancestor_mask(torch.arange(-1, nodes - 1)[None])
    assert torch.equal(mask[0], torch.ones(nodes, nodes, dtype=torch.bool).tril())


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), depth=st.integers(1, 4), topk=st.integers(1, 4), total=st.integers(2, 20))
def test_the_drafters_own_trees(seed: int, depth: int, topk: int, total: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def propose(paths: torch.Tensor) -> torch.Tensor:
        return torch.randn(len(paths), 11, generator=generator).log_softmax(-1)

    trees = [draft_tree(propose, 3, depth, topk, total) for _ in range(3)]
    layout = lay_out([tree.parents for tree in trees], torch.tensor([0, 7, 100]))
    for row, (tree, prefix) in enumerate(zip(trees, (0, 7, 100), strict=True)):
        size = len(tree.tokens)
        assert torch.equal(layout.mask[row, :size, :size], tree.ancestor_mask())
        assert torch.equal(layout.positions[row, :size], prefix + tree.depths)


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 2**32 - 1), lengths=st.lists(st.integers(0, 70), min_size=1, max_size=9))
def test_packed_segments_are_numpys_little_endian_bytes(seed: int, lengths: list[int]) -> None:
    """Each segment from a byte of its own: the semantics of FlashInfer's `segment_packbits`, bitorder little."""
    rng = np.random.default_rng(seed)
    segments = [rng.integers(0, 2, length).astype(bool) for length in lengths]
    packed, begins = pack_segments(torch.from_numpy(np.concatenate(segments)), torch.tensor(lengths))
    expected = [np.packbits(segment, bitorder="little") for segment in segments]
    assert begins.tolist() == [0, *np.cumsum([len(part) for part in expected]).tolist()]
    assert packed[: int(begins[-1])].tolist() == np.concatenate(expected).tolist()
    assert not packed[int(begins[-1]) :].any()


def test_the_drawing_of_the_packed_bits() -> None:
    bits = torch.tensor([1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1]).bool()
    packed, begins = pack_segments(bits, torch.tensor([3, 9]))
    assert packed[:3].tolist() == [0b101, 0b00000011, 0b1]
    assert begins.tolist() == [0, 1, 3]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    prefixes=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    nodes=st.integers(1, 8),
    missing=st.integers(0, 2),
)
def test_the_tree_block_of_a_flat_mask(seed: int, prefixes: list[int], nodes: int, missing: int) -> None:
    """Padding requests of a CUDA graph lie behind the mask's end: they count as visible."""
    rng = np.random.default_rng(seed)
    trees = [ancestors(random_parents(rng, nodes)) for _ in prefixes]
    flat = [
        torch.cat((torch.ones(nodes, prefix, dtype=torch.bool), tree), dim=1).flatten()
        for prefix, tree in zip(prefixes, trees, strict=True)
    ]
    block = tree_block(torch.cat(flat), torch.tensor(prefixes + [1] * missing), nodes)
    expected = trees + [torch.ones(nodes, nodes, dtype=torch.bool)] * missing
    assert torch.equal(block, torch.stack(expected))
