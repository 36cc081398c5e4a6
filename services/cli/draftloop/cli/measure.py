"""What the demo measures on a running server: answers and accepted length, speed, identity, cost of capture."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from draftloop.core.summary import CaptureOverhead, NearTie, OverheadPair
from draftloop.fleet.worker import UNCAPTURED_DOMAIN
from draftloop.generator.batch import Generation, generate_batch

BATCH = 16
NEAR_TIE_GAP = 1e-3
MOST_NEAR_TIES = 0.01
# Captured like any traffic, but not of a domain that a user has.
OVERHEAD_DOMAIN = "overhead"
OVERHEAD_TOKENS = 24
OVERHEAD_PROMPTS = 8


@dataclass(frozen=True)
class Heldout:
    """The held-out prompts, never part of the traffic. input_ids[i] belongs to domains[i]."""

    input_ids: tuple[tuple[int, ...], ...]
    domains: tuple[str, ...]


@dataclass(frozen=True)
class Answers:
    """Greedy answers to the held-out prompts. accept_length: tokens per verification, None without speculation."""

    generations: tuple[Generation, ...]
    accept_length: float | None
    by_domain: dict[str, float]


def answer_heldout(url: str, heldout: Heldout, tokens: int, *, top_logprobs: bool = False) -> Answers:
    """Answer every held-out prompt with exactly `tokens` greedy tokens, in batches of 16."""
    generations = asyncio.run(
        generate_batch(
            url,
            heldout.input_ids,
            tokens,
            domain=UNCAPTURED_DOMAIN,
            concurrency=BATCH,
            ignore_eos=True,
            top_logprobs=top_logprobs,
        )
    )
    by_domain: dict[str, list[Generation]] = defaultdict(list)
    for generation, domain in zip(generations, heldout.domains, strict=True):
        by_domain[domain].append(generation)
    lengths = {domain: accept_length(part) for domain, part in sorted(by_domain.items())}
    return Answers(
        tuple(generations),
        accept_length(generations),
        {domain: value for domain, value in lengths.items() if value is not None},
    )


def accept_length(generations: Sequence[Generation]) -> float | None:
    """Emitted tokens per verification over all answers (SGLang's spec_accept_length)."""
    steps = sum(generation.spec_verify_ct or 0 for generation in generations)
    return sum(generation.completion_tokens for generation in generations) / steps if steps else None


def tokens_per_second(url: str, input_ids: Sequence[Sequence[int]], tokens: int) -> float:
    """Generated tokens per second at batch 1: the prompts one after the other, prefill included."""
    generations = asyncio.run(
        generate_batch(url, input_ids, tokens, domain=UNCAPTURED_DOMAIN, concurrency=1, ignore_eos=True)
    )
    return sum(g.completion_tokens for g in generations) / sum(g.e2e_latency_s for g in generations)


def capture_overhead(url: str, input_ids: Sequence[Sequence[int]], pairs: int) -> CaptureOverhead:
    """Throughput with capture over throughput without, as paired batches in alternating order (on off, off on, ...)."""

    def batch(domain: str) -> float:
        start = time.perf_counter()
        done = asyncio.run(
            generate_batch(url, input_ids, OVERHEAD_TOKENS, domain=domain, concurrency=BATCH, ignore_eos=True)
        )
        return sum(g.completion_tokens for g in done) / (time.perf_counter() - start)

    batch(UNCAPTURED_DOMAIN)  # fills the prefix cache, so that no batch of a pair pays for prefill
    measured: list[OverheadPair] = []
    for index in range(pairs):
        order = (OVERHEAD_DOMAIN, UNCAPTURED_DOMAIN) if index % 2 == 0 else (UNCAPTURED_DOMAIN, OVERHEAD_DOMAIN)
        speed = {domain: batch(domain) for domain in order}
        measured.append(OverheadPair(on=speed[OVERHEAD_DOMAIN], off=speed[UNCAPTURED_DOMAIN]))
    return CaptureOverhead(ratio_on_off=statistics.median(pair.on / pair.off for pair in measured), pairs=measured)


@dataclass(frozen=True)
class Identity:
    """Speculative answers against plain decoding's. identical: see `compare`. tokens: generated, over all answers."""

    identical: bool
    prompts: int
    tokens: int
    near_ties: tuple[NearTie, ...]


def compare(plain: Sequence[Generation], others: Sequence[Sequence[Generation]]) -> Identity:
    """Compare sets of answers with plain decoding's, token by token.

    A first difference where plain decoding's two best tokens lie within 1e-3 of each other (logprobs differ as
    logits do) is floating-point noise of another batch shape: a near tie. One per cent of the prompts may be ones.
    """
    ties: dict[int, NearTie] = {}
    different = False
    for answers in others:
        for index, (reference, other) in enumerate(zip(plain, answers, strict=True)):
            position = first_difference(reference.output_ids, other.output_ids)
            if position is None:
                continue
            gap = top_gap(reference, position)
            if gap is None or gap > NEAR_TIE_GAP:
                different = True
            else:
                ties[index] = NearTie(prompt=index, position=position, gap=gap)
    too_many = len(ties) > MOST_NEAR_TIES * len(plain)
    compared = [answer for answers in others for answer in answers]
    return Identity(
        identical=bool(compared) and not different and not too_many,
        prompts=len(plain) if compared else 0,
        tokens=sum(len(answer.output_ids) for answer in compared),
        near_ties=tuple(ties[index] for index in sorted(ties)),
    )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs (a missing one differs), None when the sequences are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def top_gap(generation: Generation, position: int) -> float | None:
    """Logprob of the best token less that of the second best at `position`; None where it was not recorded."""
    if generation.top2 is None or position >= len(generation.top2) or len(generation.top2[position]) < 2:
        return None
    (_, best), (_, second) = generation.top2[position][:2]
    return best - second
