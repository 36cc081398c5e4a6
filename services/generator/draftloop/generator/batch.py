"""A fixed batch of token prompts through SGLang's native `/generate`, so that two servers get the same input."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from draftloop.core.errors import ServerError
from draftloop.generator.driver import post_json

_REQUEST_TIMEOUT_S = 600.0

TopTokens = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Generation:
    """One greedy answer.

    output_ids: the emitted tokens.  e2e_latency_s: seconds, as the server measured.
    spec_verify_ct: verification steps, None without speculation.
    top2: for each output token the two likeliest (token id, logprob) there, likeliest first; None when not asked for.
    """

    output_ids: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    spec_verify_ct: int | None
    e2e_latency_s: float
    finish_reason: str
    top2: tuple[TopTokens, ...] | None


async def generate_batch(
    base_url: str,
    input_ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    domain: str,
    concurrency: int,
    ignore_eos: bool = False,
    top_logprobs: bool = False,
) -> list[Generation]:
    """Answer every prompt at temperature 0, at most `concurrency` at a time; results are in the prompts' order.

    input_ids: token ids of each prompt.  domain: first part of the request ids, "{domain}--{uuid}".
    Raises ServerError when the server fails or refuses one of them.
    """
    gate = asyncio.Semaphore(concurrency)
    url = f"{base_url.rstrip('/')}/generate"

    async def one(client: httpx.AsyncClient, ids: Sequence[int]) -> Generation:
        body: dict[str, Any] = {
            "rid": f"{domain}--{uuid.uuid4().hex}",
            "input_ids": list(ids),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos},
        }
        if top_logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": 2}
        async with gate:
            answer = await post_json(client, url, body)
        return parse_generation(answer, top_logprobs)

    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(timeout=_REQUEST_TIMEOUT_S, limits=limits, trust_env=False) as client:
        tasks = [asyncio.ensure_future(one(client, ids)) for ids in input_ids]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


def parse_generation(answer: dict[str, Any], top_logprobs: bool) -> Generation:
    """Read one `/generate` answer: {"output_ids": [...], "meta_info": {...}}. Raises ServerError."""
    try:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]["type"]
        if reason == "abort":
            raise ServerError(f"the server aborted {meta['id']}: {meta['finish_reason'].get('message')}")
        top2 = None
        if top_logprobs:
            # Per output token a list of [logprob, token id, text or null].
            top2 = tuple(tuple((int(t[1]), float(t[0])) for t in row) for row in meta["output_top_logprobs"])
        return Generation(
            output_ids=tuple(answer["output_ids"]),
            prompt_tokens=meta["prompt_tokens"],
            completion_tokens=meta["completion_tokens"],
            spec_verify_ct=meta.get("spec_verify_ct"),
            e2e_latency_s=meta["e2e_latency"],
            finish_reason=reason,
            top2=top2,
        )
    except (KeyError, TypeError, IndexError) as err:
        raise ServerError(f"/generate answered in another layout than SGLang 0.5.23's: {err!r}") from None
