"""The CPU twins of SGLang's speculative kernels do what slow, obvious loops do.

Tables, slots and trees are drawn at random, ties included; each oracle works with Python lists or with nodes that
know their parents, never with the index arithmetic under test.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.drafters.tree import DraftTree
from draftloop.drafters.verify import verify_greedy
from draftloop.sglang.cpu import kernels

seeds = st.integers(0, 2**32 - 1)
few = settings(deadline=None, max_examples=80)


def table_of(rng: np.random.Generator, rows: int, columns: int) -> torch.Tensor:
    """A request-to-slot table in which every cell is different."""
    return torch.from_numpy(rng.permutation(rows * columns).reshape(rows, columns)).int()


@few
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6), st.integers(0, 5)), min_size=1, max_size=6))
def test_ragged_cells_lists_every_cell_in_request_order(spans: list[tuple[int, int, int]]) -> None:
    rows, start, length = (torch.tensor(column) for column in zip(*spans, strict=True))
    expected = [(row, first + i) for row, first, size in spans for i in range(size)]
    got_rows, got_columns = kernels.ragged_cells(rows, start, start + length)
    assert list(zip(got_rows.tolist(), got_columns.tolist(), strict=True)) == expected


@few
@given(seeds, st.integers(1, 5))
def test_assign_req_to_token_pool_writes_the_spans_and_nothing_else(seed: int, batch: int) -> None:
    rng = np.random.default_rng(seed)
    table = table_of(rng, 7, 12)
    rows = torch.from_numpy(rng.permutation(7)[:batch]).int()
    start = torch.from_numpy(rng.integers(0, 12, batch)).int()
    end = torch.tensor([int(rng.integers(first, 13)) for first in start.tolist()]).int()
    slots = torch.arange(1000, 1000 + int((end - start).sum()) + 3)
    expected, used = table.tolist(), iter(slots.tolist())
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        for column in range(first, last):
            expected[row][column] = next(used)
    kernels.assign_req_to_token_pool_cpu(rows, table, start, end, slots, 12)
    assert table.tolist() == expected


@few
@given(seeds, st.integers(1, 5))
def test_assign_extend_cache_locs_reads_the_spans(seed: int, batch: int) -> None:
    rng = np.random.default_rng(seed)
    table = table_of(rng, 7, 12)
    rows = torch.from_numpy(rng.permutation(7)[:batch]).int()
    start = torch.from_numpy(rng.integers(0, 12, batch))
    end = torch.tensor([int(rng.integers(first, 13)) for first in start.tolist()])
    expected = [
        int(table[row, column])
        for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True)
        for column in range(first, last)
    ]
    out = torch.full((len(expected) + 2,), -7, dtype=torch.int64)
    kernels.assign_extend_cache_locs_cpu(rows, table, start, end, out, 12)
    assert out.tolist() == [*expected, -7, -7]


@few
@given(seeds, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_draft_cache_locs_follow_the_committed_tokens(seed: int, batch: int, topk: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    table = table_of(rng, 6, 30)
    rows = torch.from_numpy(rng.permutation(6)[:batch])
    lengths = torch.from_numpy(rng.integers(0, 30 - topk * steps, batch))
    out = torch.zeros(batch * topk * steps, dtype=torch.int64)
    kernels.assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, out, 30, topk, steps)
    expected = [
        int(table[row, length + i])
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)
        for i in range(topk * steps)
    ]
    assert out.tolist() == expected


@few
@given(seeds, st.integers(1, 6), st.integers(1, 5))
def test_bonus_tokens_and_accepted_slots(seed: int, batch: int, stride: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rng.integers(0, 99, (batch, stride)))
    lengths = torch.from_numpy(rng.integers(1, stride + 1, batch)).int()
    bonus = torch.zeros(batch, dtype=torch.int64)
    kernels.fill_bonus_tokens_cpu(tokens, lengths, bonus, stride)
    assert bonus.tolist() == [int(tokens[b, lengths[b] - 1]) for b in range(batch)]

    slots = torch.from_numpy(rng.permutation(500)[: batch * stride])
    index = torch.arange(batch * stride).view(batch, stride).clone()
    index[torch.arange(stride) >= lengths[:, None]] = -1
    accepted = torch.zeros(batch * stride, dtype=torch.int64)
    kernels.fill_accept_out_cache_loc_cpu(index, slots, accepted)
    expected = [int(slots[node]) for node in index.flatten().tolist() if node >= 0]
    assert accepted.tolist()[: len(expected)] == expected
    assert set(accepted.tolist()[len(expected) :]) <= {0}


@few
@given(seeds, st.lists(st.integers(0, 5), min_size=1, max_size=5), st.booleans())
def test_rotate_input_ids_shifts_each_request_by_one(seed: int, lengths: list[int], selects: bool) -> None:
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(rng.integers(0, 99, sum(lengths)))
    new = torch.from_numpy(rng.integers(100, 199, len(lengths)))
    start = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))])
    chosen = [int(rng.integers(first, first + max(n, 1))) for first, n in zip(start.tolist(), lengths, strict=True)]
    expected: list[int] = []
    for i, n in enumerate(lengths):
        old = ids.tolist()[len(expected) : len(expected) + n]
        row = [*old[1:], *old[-1:]]
        if n:
            row[chosen[i] - int(start[i]) if selects else n - 1] = int(new[i])
        expected += row
    kernels.rotate_input_ids_cpu(
        ids, start, torch.tensor(lengths), new[:, None], torch.tensor(chosen) if selects else None
    )
    assert ids.tolist() == expected


@few
@given(seeds, st.integers(1, 12))
def test_kv_rows_move_as_if_all_at_once(seed: int, moves: int) -> None:
    """Sources and targets overlap; layers have rows of different sizes and types."""
    rng = np.random.default_rng(seed)
    slots = 16
    layers = [
        torch.from_numpy(rng.standard_normal((slots, 2, 3))).float(),
        torch.from_numpy(rng.standard_normal((slots, 5))).bfloat16(),
        torch.from_numpy(rng.integers(0, 255, (slots, 1))).to(torch.uint8),
    ]
    target = torch.from_numpy(rng.permutation(slots)[:moves])
    source = torch.from_numpy(rng.integers(0, slots, moves))
    expected = [layer.clone() for layer in layers]
    for new, old in zip(expected, layers, strict=True):
        for to, come in zip(target.tolist(), source.tolist(), strict=True):
            new[to] = old[come].clone()
    addresses = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.int64)
    strides = torch.tensor([layer[0].numel() * layer.element_size() for layer in layers])
    kernels.copy_all_layer_kv_cache_cpu(addresses, strides, target, source)
    for layer, wanted in zip(layers, expected, strict=True):
        assert torch.equal(layer, wanted)


@few
@given(seeds, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_each_draft_branch_sees_the_prefix_and_its_own_slots(seed: int, batch: int, topk: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, batch)
    width = int(lengths.max()) + topk * steps
    table = table_of(rng, 6, width)
    rows = torch.from_numpy(rng.permutation(6)[:batch])
    before = table.clone()
    slots = kernels.build_draft_decode_metadata_cpu(table, rows, torch.from_numpy(lengths), topk, steps, width)
    assert slots.shape == (batch * topk, width)
    for b, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        cells = table[row].tolist()
        for branch in range(topk):
            own = cells[length + branch * steps : length + (branch + 1) * steps]
            assert slots[b * topk + branch, : length + steps].tolist() == cells[:length] + own
    assert torch.equal(table, before)


@dataclass(eq=False)
class Node:
    """A drafted candidate; `flat` is its index among all candidates of its request."""

    token: int
    parent: Node | None
    value: float
    flat: int
    depth: int = 1


@dataclass
class Drafted:
    """What the drafter hands to the kernel for one request: parent_list, selected_index, and the nodes behind them."""

    nodes: list[Node] = field(default_factory=list)
    parent_list: list[int] = field(default_factory=list)


def draft(rng: np.random.Generator, topk: int, depth: int, count: int, ties: bool) -> Drafted:
    """EAGLE-2's growth, as SGLang lays it out: `topk` beams a level, the `count` best candidates become the tree.

    ties: confidences come from {1, 1/2}, and equal values are chosen in any order, so that a child may win a place
    that its parent lost.
    """
    drafted = Drafted(parent_list=[-1])
    flat, frontier = 0, [None]
    candidates: list[Node] = []
    for level in range(1, depth + 1):
        grown = []
        for parent in frontier:
            for token in rng.permutation(50)[:topk].tolist():
                confidence = float(rng.choice([1.0, 0.5])) if ties else float(rng.uniform(0.05, 0.95))
                value = confidence * (parent.value if parent else 1.0)
                grown.append(Node(token, parent, value, flat, level))
                flat += 1
        candidates += grown
        beams = grown if level == 1 else best(rng, grown, topk)
        # Level 1's beams are all its candidates, in order; later ones are listed in the order they were chosen.
        frontier = list(beams)
        drafted.parent_list += [beam.flat for beam in beams]
    # SGLang leaves out the last level's beams, which have no children.
    drafted.parent_list = drafted.parent_list[: len(drafted.parent_list) - len(frontier)] if depth > 1 else []
    drafted.nodes = sorted(best(rng, candidates, count), key=lambda node: node.flat)
    return drafted


def best(rng: np.random.Generator, nodes: list[Node], count: int) -> list[Node]:
    """The `count` nodes of highest value, equal ones in random order."""
    order = rng.permutation(len(nodes)).tolist()
    return [nodes[i] for i in sorted(order, key=lambda i: -nodes[i].value)][:count]


@dataclass
class BuiltTree:
    """What the kernel filled in; index, child and sibling are [B, N]."""

    mask: torch.Tensor
    positions: torch.Tensor
    index: torch.Tensor
    child: torch.Tensor
    sibling: torch.Tensor


def build(drafted: list[Drafted], lengths: list[int], topk: int, depth: int, mode: int) -> BuiltTree:
    batch, nodes = len(drafted), len(drafted[0].nodes) + 1
    cells = sum(nodes * (nodes + (length if mode == 0 else 0)) for length in lengths)
    built = BuiltTree(
        torch.ones(cells, dtype=torch.bool),
        torch.empty(batch * nodes, dtype=torch.int64),
        *(torch.full((batch, nodes), -1) for _ in range(3)),
    )
    kernels.build_tree_kernel_efficient_cpu(
        torch.tensor([d.parent_list for d in drafted], dtype=torch.int64),
        torch.tensor([[node.flat for node in d.nodes] for d in drafted], dtype=torch.int64),
        torch.tensor(lengths),
        built.mask,
        built.positions,
        built.index,
        built.child,
        built.sibling,
        topk,
        depth,
        nodes,
        mode,
    )
    return built


def reachable(child: list[int], sibling: list[int]) -> dict[int, list[int]]:
    """Node -> its children in list order, for every node that the linked lists reach from the root."""
    children: dict[int, list[int]] = {}
    waiting = [0]
    while waiting:
        node = waiting.pop()
        children[node], at = [], child[node]
        while at != -1:
            children[node].append(at)
            at = sibling[at]
        waiting += children[node]
    return children


tree_shapes = st.tuples(st.integers(1, 4), st.integers(1, 4)).flatmap(
    lambda shape: st.tuples(
        st.just(shape[0]), st.just(shape[1]), st.integers(1, min(12, shape[0] + (shape[1] - 1) * shape[0] ** 2))
    )
)


@few
@given(seeds, tree_shapes, st.lists(st.integers(0, 6), min_size=1, max_size=3), st.sampled_from([0, 1]), st.booleans())
def test_trees_are_linked_masked_and_placed(
    seed: int, shape: tuple[int, int, int], lengths: list[int], mode: int, ties: bool
) -> None:
    topk, depth, count = shape
    rng = np.random.default_rng(seed)
    drafted = [draft(rng, topk, depth, count, ties) for _ in lengths]
    built = build(drafted, lengths, topk, depth, mode)
    size = count + 1
    assert built.index.flatten().tolist() == list(range(len(lengths) * size))
    first = 0
    for b, length in enumerate(lengths):
        place: dict[Node | None, int] = {None: 0} | {node: i + 1 for i, node in enumerate(drafted[b].nodes)}
        width = size + (length if mode == 0 else 0)
        rows = built.mask[first : first + size * width].view(size, width)
        first += size * width
        assert bool(rows[:, : width - size].all()), "every node sees the whole prefix"
        children = reachable(built.child[b].tolist(), built.sibling[b].tolist())
        connected = {None: 0}
        for node in drafted[b].nodes:
            if node.parent in connected:
                connected[node] = place[node]
        # A node whose parent lost a tie for the last places is never reached, and neither is what hangs on it.
        assert sorted(children) == sorted(connected.values())
        for node, at in connected.items():
            assert children[at] == [place[n] for n in drafted[b].nodes if n in connected and n.parent is node]
            ancestors, above = {at}, node
            while above is not None:
                above = above.parent
                ancestors.add(place[above])
            assert rows[at, width - size :].nonzero().flatten().tolist() == sorted(ancestors)
            assert int(built.positions[b * size + at]) == length + (node.depth if node else 0)
    assert first == built.mask.numel()


def test_a_child_whose_parent_lost_the_tie_is_never_reached() -> None:
    """Two beams of two; of four equal candidates at depth 2 one is chosen whose parent was not."""
    parent_list, selected = torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 4]])
    child, sibling = torch.full((1, 3), -1), torch.full((1, 3), -1)
    kernels.build_tree_kernel_efficient_cpu(
        parent_list,
        selected,
        torch.tensor([5]),
        torch.ones(9, dtype=torch.bool),
        torch.empty(3, dtype=torch.int64),
        torch.empty(1, 3, dtype=torch.int64),
        child,
        sibling,
        2,
        2,
        3,
        1,
    )
    assert reachable(child[0].tolist(), sibling[0].tolist()) == {0: [1], 1: []}


def test_the_packed_mask_is_refused() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="mask mode 2"):
        kernels.build_tree_kernel_efficient_cpu(empty, empty, empty, empty, empty, empty, empty, empty, 1, 1, 2, 2)


@few
@given(seeds, st.integers(1, 4), st.integers(1, 10), st.integers(2, 5))
def test_greedy_verification_walks_like_the_recursive_oracle(seed: int, batch: int, size: int, vocab: int) -> None:
    """Random trees over few tokens, so that long paths are accepted; compared with `draftloop.drafters.verify`."""
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rng.integers(0, vocab, (batch, size)))
    wanted = torch.from_numpy(rng.integers(0, vocab, (batch, size)))
    child, sibling = torch.full((batch, size), -1), torch.full((batch, size), -1)
    trees = []
    for b in range(batch):
        parents = [-1] + [int(rng.integers(0, node)) for node in range(1, size)]
        depths = [0]
        for node in range(1, size):
            depths.append(depths[parents[node]] + 1)
            brothers = [n for n in range(1, node) if parents[n] == parents[node]]
            if brothers:
                sibling[b, brothers[-1]] = node
            else:
                child[b, parents[node]] = node
        trees.append(DraftTree(tokens[b], torch.tensor(parents), torch.tensor(depths), torch.zeros(size)))
    width = max(int(tree.depths.max()) for tree in trees) + 1
    accept_index = torch.full((batch, width), -1, dtype=torch.int32)
    counts = torch.zeros(batch, dtype=torch.int32)
    predicts = torch.full((batch * size,), -5, dtype=torch.int32)
    index = torch.arange(batch * size).view(batch, size)
    kernels.verify_tree_greedy_cpu(predicts, accept_index, counts, tokens, index, child, sibling, wanted)
    expected_predicts = [-5] * (batch * size)
    for b, tree in enumerate(trees):
        verdict = verify_greedy(tree, wanted[b])
        path = [b * size + node for node in verdict.nodes]
        assert accept_index[b].tolist() == path + [-1] * (width - len(path))
        assert int(counts[b]) == len(path) - 1
        for node, token in zip(path, verdict.tokens, strict=True):
            expected_predicts[node] = token
    assert predicts.tolist() == expected_predicts
