"""Requests whose next distribution depends on more than their tokens so far: one exact token a step.

Under speculation SGLang relaxes them: penalties are those of the step's first token for every node of the tree and
count one token a step (eagle_utils.eagle_sample), repetition penalties do nothing with DFLASH, and min-p is ignored.
Their output would not be the target's. So for such a request the draft is set aside, and the one token after the
tree's root is drawn here as plain decoding draws it. Other requests of the batch keep their drafts.

Symbols: B requests, N tree nodes or block slots, V target vocabulary, R rows drawn here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftloop.sglang.hooks import DFLASH_WORKER, Hook


def exact_hooks() -> tuple[Hook, ...]:
    """The hooks of any server that speculates."""
    current: list[Any] = []

    def begin(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        current[:] = [batch]

    def accept_block(original: Any, worker: Any, **arguments: Any) -> Any:
        return exact_blocks(original(worker, **arguments), current[0], arguments)

    return (
        Hook(
            "sglang.srt.speculative.eagle_utils.eagle_sample",
            ("verify_input", "batch", "logits_output"),
            "AFTER",
            exact_trees,
        ),
        Hook(f"{DFLASH_WORKER}.forward_batch_generation", ("self", "batch"), "BEFORE", begin),
        Hook(
            f"{DFLASH_WORKER}._accept_block",
            ("self", "candidates", "next_token_logits", "sampling_info"),
            "AROUND",
            accept_block,
        ),
    )


def exact_trees(result: Any, verify_input: Any, batch: Any, logits_output: Any, *args: Any, **kwargs: Any) -> None:
    """Overwrite what EAGLE's verification said of the rows that need it.

    result: predict [B*N], tokens emitted [B], accept_index [B, depth]. The logits [B*N, V] hold SGLang's penalties,
    which are exact at the root of a request that goes one token a step.
    """
    if batch.forward_mode.is_idle() or not (rows := exact_rows(batch.reqs)):
        return
    predict, emitted, accept_index = result
    roots = [row * verify_input.draft_token_num for row in rows]
    predict[roots] = draw(logits_output.next_token_logits[roots], batch.sampling_info, rows).to(predict.dtype)
    emitted[rows] = 1
    accept_index[rows, 1:] = -1


def exact_blocks(result: Any, batch: Any, arguments: dict[str, Any]) -> Any:
    """The same for DFLASH: (drafts accepted [B], tokens emitted [B], bonus [B], out tokens [B, N], new lengths [B])."""
    if not (rows := exact_rows(batch.reqs)):
        return result
    accepted, emitted, bonus, out_tokens, lengths = result
    info, logits = arguments["sampling_info"], arguments["next_token_logits"]
    roots = logits.view(*out_tokens.shape, -1)[rows, 0]
    if (scaling := info.penalizer_orchestrator.accumulate_scaling_penalties()) is not None:
        roots = torch.where(roots < 0, roots * scaling[rows], roots / scaling[rows])
    accepted[rows], emitted[rows] = 0, 1
    bonus[rows] = draw(roots, info, rows).to(bonus.dtype)
    out_tokens[rows, 0] = bonus[rows].to(out_tokens.dtype)
    if lengths is not None:
        lengths[rows] = arguments["prefix_lens"][rows].to(lengths.dtype) + 1
    return accepted, emitted, bonus, out_tokens, lengths


def exact_rows(requests: Any) -> list[int]:
    """Which requests of a batch need it."""
    return [row for row, request in enumerate(requests) if needs_exact(request)]


def needs_exact(request: Any) -> bool:
    """Penalties, min-p, and a minimum length that is not reached yet."""
    sampling = request.sampling_params
    return bool(
        sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.min_p
        or len(request.output_ids) <= sampling.min_new_tokens > 0
    )


def draw(logits: Tensor, info: Any, rows: list[int]) -> Tensor:
    """[R] next tokens from logits [R, V], penalties in, by the sampling parameters of `rows`; top-k 1 is greedy."""
    probs = torch.softmax(logits.float() / info.temperatures[rows], dim=-1)
    kept = filtered(probs, info.top_ks[rows], info.top_ps[rows], info.min_ps[rows])
    return torch.where(info.top_ks[rows] == 1, logits.argmax(-1), torch.multinomial(kept, 1)[:, 0])


def filtered(probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
    """What plain decoding samples from: each filter judges the whole distribution probs [R, V], the rest is not
    renormalised (layers/sampler.py, top_k_top_p_min_p_sampling_from_probs_torch)."""
    ordered, place = probs.sort(dim=-1, descending=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    before = ordered.cumsum(-1) - ordered
    keep = (rank < top_ks[:, None]) & (before <= top_ps[:, None]) & (ordered >= ordered[:, :1] * min_ps[:, None])
    return torch.zeros_like(probs).scatter_(1, place, ordered * keep)
