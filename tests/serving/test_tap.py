"""What the tap captures of a real server, for EAGLE-3's trees and for DFlash's blocks, whatever the traffic does.

    states      of random mixes (shared prefixes, chunks, retraction, aborts, sampling) are a plain forward's
    refusals    each step says what was refused and what the target wanted there
    labels      tenant and domain come from headers or the body, through every endpoint
    control     sampling, opt-outs and the byte rate change while the server serves
    consumer    one that hangs costs whole records, all of them counted, and no answer

The pool of KV slots is a fraction of what the requests ask for, so that some are retracted and computed again. On a
CPU SGLang 0.5.23 overlaps scheduling and computing for DFlash, and turns that off for EAGLE.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import LAYER_IDS, States, TinyTarget, make_tiny_target, random_prompts

from draftloop.capture.admission import Labels
from draftloop.core.config import CapturePolicy, Config
from draftloop.core.records import CaptureRecord
from draftloop.drafters.rejections import refused_drafts
from draftloop.fleet.worker import Worker
from draftloop.sglang.labels import DOMAIN_HEADER, DOMAIN_PARAM, TENANT_HEADER, TENANT_PARAM
from draftloop.trainer.day0 import make_untrained
from draftloop.trainer.trainer import Trainer

from .conftest import CHUNK, CONFIG, TRAINING_PROMPTS
from .tap_traffic import Said, Tapped, random_mix, too_much

TOP_LOGITS = 4
KINDS = ("eagle3", "dflash")
END_ID = 1
OVERFILLS = 8
ACME, OTHER = Labels("acme", "chat"), Labels("other", "code")


def config_of(kind: str) -> Config:
    config = CONFIG.model_copy(deep=True)
    config.drafter.kind = "dflash" if kind == "dflash" else "eagle3"
    config.drafter.layer_ids = LAYER_IDS
    config.server.max_total_tokens = 1024
    config.capture.ring_mib = 1
    config.capture.top_logits = TOP_LOGITS
    return config


def drafter_of(kind: str, target: TinyTarget, config: Config, folder: Path) -> Path:
    """Trained for a few seconds on what transformers says, so that drafts are accepted now and then."""
    make_untrained(target.folder, config.drafter, TRAINING_PROMPTS, folder / "v0", "v0", seed=0)
    trainer = Trainer(target.folder, folder / "v0", config)
    trainer.add_records([target.record(prompt, 48, "chat", i) for i, prompt in enumerate(TRAINING_PROMPTS)])
    steps = 0
    while steps < 80:
        steps += len(trainer.train(1e-6))
    trainer.save_candidate(folder / "v1", "v1", {})
    return folder / "v1"


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    """A target that does not say its end token, so that an answer is as long as asked. (With `ignore_eos` SGLang
    reserves all slots of a request when it starts, and never retracts one.)"""
    talker = make_tiny_target(tmp_path_factory.mktemp("talker"), seed=0)
    file = talker.folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][END_ID] = 0.0
    save_file(tensors, file, {"format": "pt"})
    return talker


@pytest.fixture(scope="module", params=KINDS)
def tapped(
    request: pytest.FixtureRequest, talker: TinyTarget, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tapped]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    kind = request.param
    config, folder = config_of(kind), tmp_path_factory.mktemp(f"tap-{kind}")
    drafter = drafter_of(kind, talker, config, folder)
    worker = Worker(talker.folder, config, folder / "server.log")
    url = worker.start(drafter)
    try:
        yield Tapped(worker, url, talker)
    finally:
        worker.stop()
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _captures_all(tapped: Tapped) -> Iterator[None]:
    yield
    tapped.worker.set_capture(CapturePolicy())


def assert_true(tapped: Tapped, said: Said, record: CaptureRecord) -> None:
    """Every row is what a plain forward over the same tokens computes there."""
    ask = said.ask
    tokens = record.token_ids.tolist()
    whole = [*ask.prompt[: record.start], *tokens]
    known = [*ask.prompt, *said.output]
    # A step may go beyond what the client was given; a client that left early knows less.
    both = min(len(whole), len(known))
    assert whole[:both] == known[:both]
    if ask.ending == "whole":
        # The last token of an answer has not been an input.
        assert len(whole) >= len(known) - 1
        if said.meta["num_retractions"] == 0:
            assert record.start == said.meta["cached_tokens"]
    assert (record.tenant, record.domain) == (ask.labels.tenant, ask.labels.domain)
    assert record.prompt_len == len(ask.prompt)
    states = tapped.target.states(whole)
    for got, expected in ((record.fused, states.fused), (record.last_hidden, states.last_hidden)):
        rows = torch.from_numpy(got).float()
        torch.testing.assert_close(rows, expected[record.start :], rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    if ask.temperature == 0.0:
        first = max(len(ask.prompt), record.start + 1)
        assert whole[first:] == states.logits[first - 1 : len(whole) - 1].argmax(-1).tolist(), "not greedy"
    assert_refusals(record, states, greedy=ask.temperature == 0.0)


def assert_refusals(record: CaptureRecord, states: States, greedy: bool) -> None:
    """What each step refused, found anew by following the record's own tokens through the tree; what the target
    wanted there, from the plain forward's logits."""
    end = record.start + record.num_tokens
    last = record.prompt_len - 1
    told: list[int] = []
    for step in record.verify_steps:
        assert step.position > last
        stopped = last = step.position + step.accepted
        assert stopped < end
        node = 0
        for token in record.token_ids[step.position + 1 - record.start : stopped + 1 - record.start].tolist():
            nodes = range(1, len(step.draft_tokens) + 1)
            (node,) = (i for i in nodes if step.parents[i - 1] == node and step.draft_tokens[i - 1] == token)
        assert step.rejected.tolist() == step.draft_tokens[step.parents == node].tolist()
        expected = states.logits[stopped].topk(TOP_LOGITS + 1)
        np.testing.assert_allclose(step.target_logits, expected.values[:TOP_LOGITS], rtol=1e-3, atol=1e-3)
        wanted = states.logits[stopped][step.target_ids.tolist()]
        np.testing.assert_allclose(step.target_logits, wanted, rtol=1e-3, atol=1e-3)
        if greedy:
            assert step.target_ids[0] not in step.rejected
            if stopped + 1 < end:
                assert step.target_ids[0] == record.token_ids[stopped + 1 - record.start]
        if step.position > record.start:
            told += step.rejected.tolist()
    assert refused_drafts(record).tokens.tolist() == told


def assert_all_true(tapped: Tapped, said: list[Said]) -> None:
    """One record of each answered request, at most one of any, and each of them true."""
    tapped.settle()
    captured = tapped.captured()
    for one in said:
        records = captured.get(one.ask.request_id, [])
        assert len(records) <= 1, "a request's span was cut"
        if one.ask.ending == "whole" and len(one.ask.prompt) + len(one.output) - one.meta["cached_tokens"] > 2:
            assert records, f"no record of {one}"
        for record in records:
            assert_true(tapped, one, record)


def retractions(said: list[Said]) -> int:
    return max(one.meta["num_retractions"] for one in said if one.ask.ending == "whole")


def test_random_mixes_are_captured_truly(tapped: Tapped) -> None:
    """The heart: mixes of requests, each with its own seed, and one that overfills the pool."""
    stems = random_prompts(3, [24, CHUNK + 10, 2 * CHUNK + 7], seed=30)
    everything: list[Said] = []
    for seed in range(1, 6):
        said = tapped.run(random_mix(np.random.default_rng(seed), 12, stems))
        assert_all_true(tapped, said)
        everything += said
    # Whether an overfilled pool takes a request back hangs on when the others came: again until it has.
    for seed in range(OVERFILLS):
        said = tapped.run(too_much(np.random.default_rng(seed)))
        assert_all_true(tapped, said)
        everything += said
        if retractions(said) > 0:
            break
    captured = tapped.captured()
    records = [record for one in everything for record in captured.get(one.ask.request_id, [])]
    steps = [step for record in records for step in record.verify_steps]
    # That the mixes hold what they are meant to.
    assert retractions(everything) > 0
    assert sum(one.reason == "abort" for one in everything) > 0
    assert sum(one.ask.ending == "disconnect" for one in everything) > 0
    assert sum(record.start > 0 for record in records) > 3
    assert sum(record.prompt_len - record.start > CHUNK for record in records) > 3
    assert sum(step.accepted > 0 for step in steps) > 10
    assert sum(step.rejected.size > 0 for step in steps) > 10
    counts = tapped.worker.counts()
    assert (counts.damaged, counts.records_throttled, counts.records_withdrawn) == (0, 0, 0)


def test_labels_come_through_every_endpoint(tapped: Tapped) -> None:
    headers = {TENANT_HEADER: "acme", DOMAIN_HEADER: "code"}
    params = {TENANT_PARAM: "mine", DOMAIN_PARAM: "chat"}
    chat = {"model": "m", "messages": [{"role": "user", "content": "bada gofi"}], "max_tokens": 4}
    prompt = {"model": "m", "prompt": "bada gofi", "max_tokens": 4}
    native = {"text": "bada gofi", "sampling_params": {"max_new_tokens": 4}}
    expected = {}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", prompt), ("/generate", native)):
        for number, (extra, given, labels) in enumerate(
            [
                ({}, {}, ("default", "default")),
                ({}, headers, ("acme", "code")),
                ({"custom_params": params}, {}, ("mine", "chat")),
                ({"custom_params": params}, {TENANT_HEADER: "acme"}, ("acme", "chat")),
            ]
        ):
            sent = dict(body)
            if path == "/generate":
                sent["sampling_params"] = native["sampling_params"] | extra  # type: ignore[operator]
            else:
                sent |= extra
            request_id = f"{path}{number}"
            tapped.post(path, sent | {"rid": request_id}, given)
            expected[request_id] = labels
    tapped.settle()
    captured = tapped.captured()
    found = {request_id: captured[request_id][0] for request_id in expected}
    assert {name: (record.tenant, record.domain) for name, record in found.items()} == expected


def test_the_policy_changes_while_serving(tapped: Tapped) -> None:
    prompts = iter(random_prompts(20, [20, 30], seed=31))

    def captured_under(policy: CapturePolicy) -> set[Labels]:
        tapped.worker.set_capture(policy)
        asks = [tapped.ask(next(prompts), 4, labels) for labels in (ACME, OTHER)]
        tapped.run(asks)
        tapped.settle()
        return {ask.labels for ask in asks if ask.request_id in tapped.captured()}

    assert captured_under(CapturePolicy()) == {ACME, OTHER}
    assert captured_under(CapturePolicy(sample_rate=0.0)) == set()
    assert captured_under(CapturePolicy(skip_tenants=frozenset({"acme"}))) == {OTHER}
    assert captured_under(CapturePolicy(tenants=frozenset({"acme"}))) == {ACME}
    assert captured_under(CapturePolicy(skip_domains=frozenset({"chat"}))) == {OTHER}
    assert captured_under(CapturePolicy(domains=frozenset({"chat"}))) == {ACME}
    assert captured_under(CapturePolicy()) == {ACME, OTHER}


def test_our_own_measurements_are_never_captured(tapped: Tapped) -> None:
    hidden = tapped.ask([20, 21, 22, 23], 8, Labels("default", "heldout"))
    seen = tapped.ask([24, 25, 26, 27], 8, ACME)
    tapped.run([hidden, seen])
    tapped.settle()
    assert hidden.request_id not in tapped.captured()
    assert seen.request_id in tapped.captured()


def test_an_opt_out_takes_running_requests_along(tapped: Tapped) -> None:
    """The policy changes between two tokens of a streamed answer."""
    before = tapped.worker.counts().records_withdrawn
    asks = [tapped.ask(prompt, 120, ACME) for prompt in random_prompts(1, [20], seed=32)]
    with httpx.stream("POST", f"{tapped.url}/generate", json=asks[0].body, timeout=300, trust_env=False) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
        next(lines)
        tapped.worker.set_capture(CapturePolicy(skip_tenants=frozenset({"acme"})))
        answered = len(list(lines))
    tapped.settle()
    assert answered > 0
    assert asks[0].request_id not in tapped.captured()
    assert tapped.worker.counts().records_withdrawn == before + 1


def test_the_byte_rate_leaves_out_whole_records_and_counts_them(tapped: Tapped) -> None:
    """One byte a second: the first record is begun with a byte in hand and kept whole; its debt outlasts the test."""
    before = tapped.worker.counts()
    tapped.worker.set_capture(CapturePolicy(max_bytes_per_s=1))
    asks = [tapped.ask(prompt, 8, ACME) for prompt in random_prompts(5, [20], seed=33)]
    said = tapped.run(asks, at_once=1)
    tapped.settle()
    counts, captured = tapped.worker.counts(), tapped.captured()
    assert [ask.request_id in captured for ask in asks] == [True, False, False, False, False]
    assert counts.records_throttled - before.records_throttled == 4
    assert counts.records_dropped == before.records_dropped
    assert_true(tapped, said[0], captured[asks[0].request_id][0])


def test_a_consumer_that_hangs_costs_records_and_no_answer(tapped: Tapped) -> None:
    """Its thread is held before it can hand on a message; the ring of 1 MiB takes some thousand rows at 1 KiB each."""
    collector, ring = tapped.worker._collector, tapped.worker._ring
    assert collector is not None
    assert ring is not None
    before = ring.counters()
    prompts = random_prompts(24, [100], seed=34)
    asks = [tapped.ask(prompt, 24, ACME) for prompt in prompts]
    with collector._lock:
        said = tapped.run(asks)
        hung = ring.counters()
    assert [one.reason for one in said] == ["length"] * len(asks)
    assert hung.records_dropped > before.records_dropped
    tapped.settle()
    captured = tapped.captured()
    kept = [one for one in said if one.ask.request_id in captured]
    assert len(kept) + ring.counters().records_dropped - before.records_dropped == len(asks)
    for one in kept:
        (record,) = captured[one.ask.request_id]
        assert_true(tapped, one, record)
    # And it is all well again.
    assert_all_true(tapped, tapped.run([tapped.ask(prompts[0], 24, ACME)]))
