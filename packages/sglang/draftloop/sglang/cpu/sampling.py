"""Sampling at temperature > 0 with a draft tree, without loss, on a CPU.

SGLang's CPU path verifies greedily whatever the temperature, so a sampled request would silently get arg-max
answers. Here the three kernels it has on a GPU only get torch twins, and the greedy shortcut is left to batches that
are greedy. Symbols: B requests, N tree nodes, V target vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def verify_uses_greedy(*, is_all_greedy: bool, **platform: Any) -> bool:
    """Replaces SGLang's choice: greedy verification for greedy batches only."""
    return is_all_greedy


def supply_kernels() -> None:
    """Fill the names SGLang leaves None where a platform has no kernel, in the modules that already hold them."""
    from sglang.kernels.ops.sampling import renorm
    from sglang.kernels.ops.speculative import verify_sampling
    from sglang.srt.speculative import dflash_utils, eagle_utils

    for module in (renorm, eagle_utils, dflash_utils):
        module.top_k_renorm_prob = top_k_renorm_prob
        module.top_p_renorm_prob = top_p_renorm_prob
    for module in (verify_sampling, eagle_utils, dflash_utils):
        module.tree_speculative_sampling_target_only = tree_speculative_sampling_target_only
    # Decided when the module was imported, without a kernel then: DFLASH would verify sampled requests greedily.
    dflash_utils._DFLASH_SAMPLING_VERIFY_AVAILABLE = True


def top_k_renorm_prob(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Keep each row's top_ks[i] largest probabilities (all that tie with the last kept one), as they are.

    Not renormalised, in spite of the name it replaces: top-p comes next, and in plain decoding both judge the whole
    distribution (layers/sampler.py); `tree_speculative_sampling_target_only` takes any scale.
    probs: [R, V]; top_ks: [R].
    """
    ordered = probs.sort(dim=-1, descending=True).values
    last = (top_ks.long().clamp(1, probs.shape[-1]) - 1)[:, None]
    return probs * (probs >= ordered.gather(1, last))


def top_p_renorm_prob(probs: Tensor, top_ps: Tensor) -> Tensor:
    """Keep the smallest set of largest probabilities whose mass reaches top_ps[i], as they are.

    probs: [R, V]; top_ps: [R].
    """
    ordered, place = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    return probs * torch.zeros_like(probs, dtype=torch.bool).scatter_(1, place, before < top_ps[:, None])


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Walk each tree: the siblings of a level share one coin against their cumulated target probability.

    The proposal is a point mass a node, so accepting child x when the coin falls into x's share of p, and drawing
    from p without the rejected children otherwise, emits exactly p (Lossless verification in the EAGLE papers).

    candidates, uniform_samples: [B, N]; target_probs: [B, N, V], row n after node n, of any scale. Thresholds below 1
    accept more and are not lossless; they keep SGLang's meaning. Fills accept_index [B, depth + 1], accept_token_num
    [B] and predicts [B * N]. draft_probs is the GPU kernel's scratch and is not used.
    """
    target_probs = target_probs / target_probs.sum(-1, keepdim=True)
    tokens, index = candidates.tolist(), retrive_index.tolist()
    child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    coins = uniform_samples.tolist()
    for b, last_coin in enumerate(uniform_samples_for_final_sampling.tolist()):
        node, last, accepted = 0, index[b][0], 0
        accept_index[b, 0] = last
        while True:
            rejected: list[int] = []
            found = -1
            if accepted + 1 < accept_index.shape[1]:
                found, rejected = _try_children(
                    target_probs[b, node], tokens[b], child[b][node], sibling[b], coins[b][node],
                    threshold_single, threshold_acc,
                )  # fmt: skip
            if found == -1:
                predicts[last] = _draw(target_probs[b, node], rejected, last_coin)
                break
            predicts[last] = tokens[b][found]
            accepted += 1
            node, last = found, index[b][found]
            accept_index[b, accepted] = last
        accept_token_num[b] = accepted


def _try_children(
    probs: Tensor, tokens: list[int], first: int, sibling: list[int], coin: float, single: float, total: float
) -> tuple[int, list[int]]:
    """(accepted child or -1, tokens rejected before it). probs: [V] after the parent."""
    rejected: list[int] = []
    mass, node = 0.0, first
    while node != -1:
        probability = float(probs[tokens[node]])
        mass += probability
        if coin < mass / total or probability >= single:
            return node, rejected
        rejected.append(tokens[node])
        node = sibling[node]
    return -1, rejected


def _draw(probs: Tensor, without: list[int], coin: float) -> int:
    """A token from probs [V] with some tokens taken out, by inverting the cumulated distribution at `coin`."""
    left = probs.double()
    if without:
        left[without] = 0.0  # `double` made a copy
    cumulated = left.cumsum(0)
    place = torch.searchsorted(cumulated, coin * cumulated[-1], right=True)
    # Rounding may push the point past the last token with any probability.
    return min(int(place), int(left.nonzero()[-1]))
