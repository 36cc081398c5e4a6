"""The draft vocabulary and its two id spaces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.core.errors import CheckpointError, ConfigError
from draftloop.drafters.vocab import (
    build_draft_vocab,
    count_tokens,
    coverage,
    ids_from_offsets,
    move_vocab,
    offsets_from_ids,
)


def test_most_frequent_with_ties_and_fill_to_the_lower_id() -> None:
    counts = count_tokens([[5, 5, 5, 2], [7, 2, 9]], vocab_size=12)
    assert counts.tolist() == [0, 0, 2, 0, 0, 3, 0, 1, 0, 1, 0, 0]
    assert build_draft_vocab(counts, 3).tolist() == [2, 5, 7]
    assert build_draft_vocab(counts, 3, always=[11]).tolist() == [2, 5, 11]
    assert build_draft_vocab(counts, 6).tolist() == [0, 1, 2, 5, 7, 9]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.data())
def test_build_keeps_the_heaviest_and_inverts(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    ids = build_draft_vocab(torch.tensor(counts), size)
    assert ids.tolist() == sorted(sorted(range(len(counts)), key=lambda i: (-counts[i], i))[:size])
    assert torch.equal(ids_from_offsets(offsets_from_ids(ids, len(counts))), ids)


@pytest.mark.parametrize("bad", [[3, 2], [1, 1], [-1, 2], [4, 10]])
def test_wrong_maps_are_refused(bad: list[int]) -> None:
    with pytest.raises(CheckpointError, match="strictly increasing"):
        offsets_from_ids(torch.tensor(bad), 10)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be between"):
        build_draft_vocab(torch.zeros(4), 5)
    with pytest.raises(ConfigError, match="cannot hold"):
        build_draft_vocab(torch.zeros(4), 1, always=[0, 1])
    with pytest.raises(ConfigError, match="do not fit"):
        build_draft_vocab(torch.zeros(4), 2, always=[4])


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_a_move_carries_each_kept_tokens_row(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 12))
    maps = st.lists(st.integers(0, 20), min_size=size, max_size=size, unique=True).map(sorted)
    old, new = data.draw(maps), data.draw(maps)
    move = move_vocab(torch.tensor(old), torch.tensor(new))
    rows, fresh = torch.randn(size, 3), torch.randn(size, 3)
    carried = move.carry(rows, fresh)
    for place, token in enumerate(new):
        assert bool(move.kept[place]) == (token in old)
        assert torch.equal(carried[place], rows[old.index(token)] if token in old else fresh[place])


def test_a_move_keeps_the_size() -> None:
    with pytest.raises(CheckpointError, match="2 tokens cannot become one of 3"):
        move_vocab(torch.tensor([1, 2]), torch.tensor([1, 2, 3]))


def test_coverage() -> None:
    counts = torch.tensor([6, 0, 3, 1])
    assert coverage(counts, torch.tensor([0, 3])) == 0.7
    assert coverage(torch.zeros(4, dtype=torch.int64), torch.tensor([0])) == 1.0
