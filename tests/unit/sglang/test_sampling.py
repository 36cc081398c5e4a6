"""The CPU twins of SGLang's sampling kernels: renormalisation by oracle, tree sampling by its output law."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftloop.sglang.cpu import sampling

VOCAB = 6
# root 0 with children 1, 2 (siblings) and 3 below 1.
TOKENS = [5, 0, 1, 2]
NEXT_TOKEN = [1, 3, -1, -1]
NEXT_SIBLING = [-1, 2, -1, -1]
DRAWS = 40_000


def _probs(seed: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, VOCAB, generator=generator).pow(3).softmax(-1)


@given(st.integers(0, 10_000), st.integers(1, VOCAB))
def test_top_k_keeps_the_k_largest(seed: int, k: int) -> None:
    probs = _probs(seed, 1)
    kept = sampling.top_k_renorm_prob(probs, torch.tensor([k]))[0]
    best = sorted(range(VOCAB), key=lambda token: -float(probs[0, token]))[:k]
    expected = torch.zeros(VOCAB)
    for token in best:
        expected[token] = probs[0, token]
    assert torch.allclose(kept, expected, atol=1e-6)


@given(st.integers(0, 10_000), st.floats(0.05, 0.999))
def test_top_p_keeps_the_smallest_set_that_reaches_p(seed: int, p: float) -> None:
    probs = _probs(seed, 1)
    kept = sampling.top_p_renorm_prob(probs, torch.tensor([p]))[0]
    mass, expected = 0.0, set()
    for token in sorted(range(VOCAB), key=lambda token: -float(probs[0, token])):
        if mass >= p - 1e-6:
            break
        expected.add(token)
        mass += float(probs[0, token])
    assert set(kept.nonzero()[:, 0].tolist()) == expected
    assert float(kept.sum()) == pytest.approx(mass, abs=1e-5)


def _sample(probs: torch.Tensor, draws: int) -> list[tuple[int, ...]]:
    """Emitted tokens of `draws` independent verifications of the same tree. probs: [N, V] after each node."""
    nodes = len(TOKENS)
    generator = torch.Generator().manual_seed(0)
    predicts = torch.zeros(draws * nodes, dtype=torch.int32)
    accept_index = torch.full((draws, 3), -1, dtype=torch.int32)
    accepted = torch.zeros(draws, dtype=torch.int32)
    sampling.tree_speculative_sampling_target_only(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accepted,
        candidates=torch.tensor([TOKENS]).repeat(draws, 1),
        retrive_index=torch.arange(draws * nodes).view(draws, nodes),
        retrive_next_token=torch.tensor([NEXT_TOKEN]).repeat(draws, 1),
        retrive_next_sibling=torch.tensor([NEXT_SIBLING]).repeat(draws, 1),
        uniform_samples=torch.rand(draws, nodes, generator=generator),
        uniform_samples_for_final_sampling=torch.rand(draws, generator=generator),
        target_probs=probs.expand(draws, -1, -1),
        draft_probs=torch.zeros(0),
    )
    return [tuple(int(predicts[accept_index[b, i]]) for i in range(int(accepted[b]) + 1)) for b in range(draws)]


def test_tree_sampling_emits_the_targets_law() -> None:
    """First tokens follow p(.|root); what follows an accepted child follows p(.|child). Chi-square, fixed seed."""
    probs = _probs(3, len(TOKENS))
    emitted = _sample(probs, DRAWS)
    counts = torch.zeros(VOCAB)
    for tokens in emitted:
        counts[tokens[0]] += 1
    expected = probs[0] * DRAWS
    # 5 degrees of freedom: 20.5 is the 0.1 % point.
    assert float(((counts - expected) ** 2 / expected).sum()) < 20.5
    for node in (1, 2):
        after = torch.zeros(VOCAB)
        for tokens in emitted:
            if tokens[0] == TOKENS[node]:
                after[tokens[1]] += 1
        expected = probs[node] * after.sum()
        assert after.sum() > 1000
        assert float(((after - expected) ** 2 / expected).sum()) < 20.5


def test_certain_children_are_always_accepted() -> None:
    probs = torch.zeros(len(TOKENS), VOCAB)
    for node, token in enumerate((TOKENS[1], TOKENS[3], 4, 4)):
        probs[node, token] = 1.0
    assert set(_sample(probs, 64)) == {(TOKENS[1], TOKENS[3], 4)}


def test_greedy_shortcut_only_for_greedy_batches() -> None:
    assert sampling.verify_uses_greedy(is_all_greedy=True, is_cpu=True)
    assert not sampling.verify_uses_greedy(is_all_greedy=False, is_cpu=True)
