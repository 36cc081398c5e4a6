"""A real SGLang server with a speculative tree and our tap, against plain transformers.

    output      every greedy token is transformers' own, alone, in a batch, from the cache, in chunks
    capture     every captured row is what a plain forward computes; verification steps add up
    drafting    the drafted tree is the one the checkpoint implies

The tests share one server (a start takes half a minute); each leaves the drafter v0 in service, the last ends it.
"""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from processes import shared_memory
from safetensors.torch import load_file
from tiny_llama import random_prompts

from draftloop.core.errors import ServerError
from draftloop.drafters.load.shapes import Shape

from .checks import (
    LENGTHS,
    NODES,
    assert_greedy,
    assert_steps_add_up,
    assert_true_states,
    paths_of,
)
from .conftest import CHUNK, CONFIG, Served
from .eagle3_by_hand import Eagle3ByHand

TOPK, STEPS = CONFIG.server.topk, CONFIG.server.num_steps


# --- output


def test_one_prompt_at_a_time(served: Served) -> None:
    answers = [served.ask_one(prompt, 40) for prompt in random_prompts(4, LENGTHS[:4], seed=10)]
    assert_greedy(served, answers, 40)
    assert min(len(set(answer.output)) for answer in answers) > 8, "the target repeats itself: nothing is proven"


def test_a_batch_of_mixed_lengths_and_again_from_the_cache(served: Served) -> None:
    prompts = random_prompts(8, LENGTHS, seed=11)
    first = served.ask(prompts, 40)
    assert_greedy(served, first, 40)
    assert max(answer.meta["cached_tokens"] for answer in first) < 8
    again = served.ask(prompts, 40)
    assert [answer.output for answer in again] == [answer.output for answer in first]
    assert all(a.meta["cached_tokens"] >= len(a.prompt) // 2 for a in again if len(a.prompt) > 8)


def test_more_requests_than_may_run(served: Served) -> None:
    """Twice `max_running_requests`, so that some wait and join a running batch."""
    prompts = random_prompts(2 * CONFIG.server.max_running_requests, LENGTHS, seed=12)
    assert_greedy(served, served.ask(prompts, 24), 24)


def test_a_grammar_holds_and_the_drafts_go_on(served: Served) -> None:
    """Greedy and sampled, beside requests without one; a token outside the expression is never emitted."""
    expression = "[abdiko]{24}"

    def ask(temperature: float) -> dict[str, Any]:
        body = {
            "text": "bado kiru",
            "sampling_params": {"regex": expression, "temperature": temperature, "max_new_tokens": 40},
        }
        response = httpx.post(f"{served.url}/generate", json=body, timeout=300, trust_env=False)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    with ThreadPoolExecutor(4) as pool:
        free = pool.submit(served.ask, random_prompts(3, [9], seed=19), 24)
        bound = list(pool.map(ask, (0.0, 0.0, 1.0)))
    assert_greedy(served, free.result(), 24)
    assert bound[0]["text"] == bound[1]["text"]
    for answer in bound:
        assert re.fullmatch(expression, answer["text"].strip()), answer["text"]
        assert answer["meta_info"]["spec_verify_ct"] > 0


# --- capture


def test_captured_rows_are_a_plain_forwards(served: Served) -> None:
    """Concurrent requests, in chunks where they are long."""
    answers = served.ask(random_prompts(8, LENGTHS, seed=13), 32)
    for answer, record in zip(answers, served.records(answers), strict=True):
        # A random prompt may share its first tokens with an earlier one.
        assert record.start <= 2
        assert (record.domain, record.prompt_len) == ("chat", len(answer.prompt))
        assert_true_states(served, answer, record)
        assert_steps_add_up(answer, record)
        assert {step.drafter_version for step in record.verify_steps} == {"v0"}


def test_cached_prefixes_start_later_and_are_as_true(served: Served) -> None:
    (stem,) = random_prompts(1, [CHUNK + 40], seed=14)
    tails = random_prompts(4, [3, 20, CHUNK + 9], seed=15)
    served.ask_one(stem, 4)
    answers = served.ask([[*stem, *tail] for tail in tails], 24, domain="code")
    for answer, record in zip(answers, served.records(answers), strict=True):
        assert 0 < record.start <= len(stem)
        assert record.start == answer.meta["cached_tokens"]
        assert record.domain == "code"
        assert_true_states(served, answer, record)
        assert_steps_add_up(answer, record)


def test_the_opted_out_domain_is_never_captured(served: Served) -> None:
    prompts = random_prompts(6, LENGTHS, seed=16)
    hidden = served.ask(prompts[:3], 16, domain="heldout")
    seen = served.ask(prompts[3:], 16)
    served.records(seen)
    assert_greedy(served, hidden, 16)
    captured = served.captured_ids()
    assert {answer.request_id for answer in seen} <= captured
    assert not [request_id for request_id in captured if request_id.startswith("heldout")]


def test_nothing_was_dropped_or_damaged(served: Served) -> None:
    counts = served.worker.counts()
    assert (counts.records_dropped, counts.damaged) == (0, 0)


# --- drafting


def test_the_tree_is_the_one_the_checkpoint_implies(served: Served, trained: tuple[Path, Path]) -> None:
    """The first tree of each request, path by path, for the day-0 drafter and a trained one.

    A prompt in which two scores lie within 1e-4 of each other decides nothing; there may be few.
    """
    compared = moved = 0
    for seed, version, folder in ((17, "v0", served.drafter), (18, "v1", trained[0])):
        if version != "v0":
            served.worker.swap(folder)
        embedding = served.target.model.get_input_embeddings().weight.detach()
        by_hand = Eagle3ByHand(load_file(folder / "model.safetensors"), embedding)
        answers = served.ask(random_prompts(8, [6, 11, 33, CHUNK + 20], seed=seed), 8)
        for answer, record in zip(answers, served.records(answers), strict=True):
            step = record.verify_steps[0]
            assert step.drafter_version == version
            fused = served.target.states(answer.prompt).fused
            expected = by_hand.draft(fused, [*answer.prompt[1:], answer.output[0]], TOPK, STEPS, NODES)
            if expected.margin < 1e-4:
                continue
            compared += 1
            moved += expected.moved
            assert set(paths_of(step)) == expected.paths
    served.worker.swap(served.drafter)
    assert compared >= 12
    assert moved >= 1


# --- what its steps cost


def test_a_server_that_keeps_its_shape_says_what_its_steps_cost(served: Served) -> None:
    """What it measures depends on the machine; that gate and simulation can read it does not."""
    served.ask(random_prompts(4, LENGTHS[:4], seed=17), 8)
    costs = served.worker.costs()
    assert costs is not None
    assert (costs.shape, costs.follows, costs.resting) == (Shape(STEPS, TOPK, NODES), False, 0.0)
    assert set(costs.batches) <= set(range(1, CONFIG.server.max_running_requests + 1))
    assert costs.tokens_per_s(2.0) == pytest.approx(2.0 * costs.tokens_per_s(1.0))
    assert costs.plain_tokens_per_s > 0
    assert served.worker.speculation() is None


# --- the end


def test_a_server_that_dies_is_one_clear_line_and_leaves_nothing(served: Served, trained: tuple[Path, Path]) -> None:
    server = psutil.Process(served.worker._server._process.pid)  # type: ignore[union-attr]
    processes = [server, *server.children(recursive=True)]
    assert len(processes) >= 3
    ring = Path("/dev/shm") / served.worker._ring.name  # type: ignore[union-attr]
    shm = {ring, *shared_memory(processes)}
    assert any(path.name.startswith("sglang_") for path in shm)
    assert all(path.exists() for path in shm)
    os.killpg(server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while served.worker._server.alive and time.monotonic() < deadline:  # type: ignore[union-attr]
        time.sleep(0.05)
    for call in (served.worker.counts, lambda: served.worker.swap(trained[0])):
        with pytest.raises(ServerError, match="the SGLang server died") as caught:
            call()
        assert "\n" not in str(caught.value)
        assert "server.log" in str(caught.value)
    served.worker.stop()
    served.worker.stop()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
    assert [path for path in shm if path.exists()] == []
