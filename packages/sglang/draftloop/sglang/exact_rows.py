"""Requests whose next distribution depends on more than their tokens so far: one exact token a step.

Under speculation SGLang relaxes them: penalties are those of the step's first token for every node of the tree, count
one token a step, and lag behind with the overlap schedule (eagle_utils.eagle_sample); with DFLASH they do nothing; and
min-p is ignored. Their output would not be the target's. So for such a request the draft is set aside, and the one
token after the tree's root is drawn here as plain decoding draws it. Other requests of the batch keep their drafts.

Symbols: B requests, N tree nodes or block slots, V target vocabulary, R rows drawn here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftloop.sglang.hooks import DFLASH_WORKER, Hook

DFLASH_UTILS = "sglang.srt.speculative.dflash_utils"


def exact_hooks() -> tuple[Hook, ...]:
    """The hooks of any server that speculates."""
    current: list[Any] = []

    def begin(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        current[:] = [batch]

    def accept_block(original: Any, worker: Any, **arguments: Any) -> Any:
        return exact_blocks(original(worker, **arguments), current[0].reqs, arguments)

    return (
        Hook(
            "sglang.srt.speculative.eagle_utils.eagle_sample",
            ("verify_input", "batch", "logits_output"),
            "AROUND",
            exact_trees,
        ),
        Hook(
            f"{DFLASH_UTILS}.build_speculative_verify_target_probs",
            ("next_token_logits", "sampling_info", "draft_token_num", "bs"),
            "AROUND",
            joint_filters,
        ),
        Hook(
            f"{DFLASH_UTILS}.apply_dflash_verify_logits_adjustments",
            ("next_token_logits", "sampling_info", "draft_token_num"),
            "AROUND",
            without_live_penalties,
        ),
        Hook(f"{DFLASH_WORKER}.forward_batch_generation", ("self", "batch"), "BEFORE", begin),
        Hook(
            f"{DFLASH_WORKER}._accept_block",
            ("self", "candidates", "next_token_logits", "sampling_info"),
            "AROUND",
            accept_block,
        ),
    )


@dataclass(frozen=True, slots=True)
class ExactRow:
    """Row `index` of a batch. root: its newest token.  produced: tokens of the answer so far, the root included."""

    index: int
    request: Any
    root: int
    produced: int

    def answer(self) -> list[int]:
        """With the overlap schedule SGLang's own list has not seen the root yet."""
        seen: list[int] = list(self.request.output_ids)
        return seen if len(seen) == self.produced else [*seen, self.root]


def exact_rows(requests: Sequence[Any], roots: Tensor, lengths: Tensor) -> list[ExactRow]:
    """The rows that need it. roots: [B] newest tokens; lengths: [B] tokens before them."""
    return [
        ExactRow(index, request, int(roots[index]), int(lengths[index]) - len(request.origin_input_ids) + 1)
        for index, request in enumerate(requests)
        if needs_exact(request)
    ]


def needs_exact(request: Any) -> bool:
    """Penalties, min-p, and a minimum length that is not reached yet."""
    sampling = request.sampling_params
    return bool(
        sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.repetition_penalty != 1.0
        or (sampling.min_p and sampling.top_k != 1)
        or len(request.output_ids) <= sampling.min_new_tokens > 0
    )


def exact_trees(original: Any, verify_input: Any, batch: Any, logits_output: Any, *args: Any, **kwargs: Any) -> Any:
    """EAGLE's verification: predict [B*N], tokens emitted [B], accept_index [B, depth]; logits [B*N, V]."""
    if batch.forward_mode.is_idle() or not any(map(needs_exact, batch.reqs)):
        return original(verify_input, batch, logits_output, *args, **kwargs)
    info, nodes = batch.sampling_info, verify_input.draft_token_num
    rows = exact_rows(batch.reqs, verify_input.draft_token.view(-1, nodes)[:, 0], batch.seq_lens)
    kept = info.acc_additive_penalties, info.acc_scaling_penalties
    info.acc_additive_penalties = info.acc_scaling_penalties = None
    try:
        predict, emitted, accept_index = original(verify_input, batch, logits_output, *args, **kwargs)
    finally:
        info.acc_additive_penalties, info.acc_scaling_penalties = kept
    places = [row.index for row in rows]
    roots = [place * nodes for place in places]
    predict[roots] = draw(logits_output.next_token_logits[roots], info, rows).to(predict.dtype)
    emitted[places] = 1
    accept_index[places, 1:] = -1
    return predict, emitted, accept_index


def exact_blocks(result: Any, requests: Sequence[Any], arguments: dict[str, Any]) -> Any:
    """The same for DFLASH: (drafts accepted [B], tokens emitted [B], bonus [B], out tokens [B, N], new lengths [B])."""
    rows = exact_rows(requests, arguments["candidates"][:, 0], arguments["prefix_lens"])
    if not rows:
        return result
    accepted, emitted, bonus, out_tokens, lengths = result
    places = [row.index for row in rows]
    roots = arguments["next_token_logits"].view(*out_tokens.shape, -1)[places, 0]
    accepted[places], emitted[places] = 0, 1
    bonus[places] = draw(roots, arguments["sampling_info"], rows).to(bonus.dtype)
    out_tokens[places, 0] = bonus[places].to(out_tokens.dtype)
    if lengths is not None:
        lengths[places] = arguments["prefix_lens"][places].to(lengths.dtype) + 1
    return accepted, emitted, bonus, out_tokens, lengths


def without_live_penalties(original: Any, *, sampling_info: Any, **arguments: Any) -> None:
    """DFLASH without the overlap schedule adds some penalties itself; all of them are added in `draw`."""
    kept, sampling_info.penalizer_orchestrator = sampling_info.penalizer_orchestrator, None
    try:
        original(sampling_info=sampling_info, **arguments)
    finally:
        sampling_info.penalizer_orchestrator = kept


def draw(logits: Tensor, info: Any, rows: Sequence[ExactRow]) -> Tensor:
    """[R] next tokens from logits [R, V] by each row's own sampling parameters; a top-k of 1 is greedy."""
    logits = torch.stack([penalised(row_logits.float(), row) for row_logits, row in zip(logits, rows, strict=True)])
    places = [row.index for row in rows]
    probs = torch.softmax(logits / info.temperatures[places], dim=-1)
    kept = filtered(probs, info.top_ks[places], info.top_ps[places], info.min_ps[places])
    return torch.where(info.top_ks[places] == 1, logits.argmax(-1), torch.multinomial(kept, 1)[:, 0])


def penalised(logits: Tensor, row: ExactRow) -> Tensor:
    """[V] logits with the penalties of the answer so far, in SGLang's order (sampling/penaltylib)."""
    sampling = row.request.sampling_params
    answer = torch.tensor(row.answer(), device=logits.device)
    counts = torch.bincount(answer, minlength=len(logits))[: len(logits)]
    logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    if row.produced < sampling.min_new_tokens:
        logits[stop_tokens(row.request)] = -torch.inf
    scaled = torch.where(logits < 0, logits * sampling.repetition_penalty, logits / sampling.repetition_penalty)
    return torch.where(counts > 0, scaled, logits)


def stop_tokens(request: Any) -> list[int]:
    """Every token that may end the request."""
    tokens = {*(request.sampling_params.stop_token_ids or ()), *(request.eos_token_ids or ())}
    if request.tokenizer is not None:
        tokens |= {request.tokenizer.eos_token_id, *(request.tokenizer.additional_stop_token_ids or ())}
    return sorted(tokens - {None})


def filtered(probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
    """What plain decoding samples from: each filter judges the whole distribution probs [R, V], the rest is not
    renormalised (layers/sampler.py, top_k_top_p_min_p_sampling_from_probs_torch)."""
    ordered, place = probs.sort(dim=-1, descending=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    before = ordered.cumsum(-1) - ordered
    keep = (rank < top_ks[:, None]) & (before <= top_ps[:, None]) & (ordered >= ordered[:, :1] * min_ps[:, None])
    return torch.zeros_like(probs).scatter_(1, place, ordered * keep)


def joint_filters(original: Any, **arguments: Any) -> Tensor:
    """[B, N, V] what DFLASH verifies against. SGLang lets top-p judge what top-k has left and renormalised; in plain
    decoding both judge the whole distribution. Where only one of them is in use its own form is right, and faster."""
    info = arguments["sampling_info"]
    if not (info.need_top_k_sampling and info.need_top_p_sampling):
        probs: Tensor = original(**arguments)
        return probs
    logits, nodes = arguments["next_token_logits"], arguments["draft_token_num"]
    temperatures, top_ks, top_ps = (
        each.repeat_interleave(nodes, dim=0) for each in (info.temperatures, info.top_ks, info.top_ps)
    )
    kept = filtered(torch.softmax(logits.float() / temperatures, dim=-1), top_ks, top_ps, torch.zeros_like(top_ps))
    return (kept / kept.sum(-1, keepdim=True)).view(arguments["bs"], nodes, -1)
