"""What the tap decides without a server: a request's labels, SGLang's linked trees, the target's best tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from draftloop.capture.admission import Labels
from draftloop.sglang.labels import DOMAIN_PARAM, TENANT_HEADER, TENANT_PARAM, label_from_headers, labels_of
from draftloop.sglang.tap import TAP_ENV, TapSettings, VerifiedTrees, best_tokens, tree_parents


@pytest.mark.parametrize(
    ("request_id", "params", "labels"),
    [
        ("chat--1f", None, Labels("default", "chat")),
        ("a--b--c", {}, Labels("default", "a")),
        ("--1f", None, Labels("default", "default")),
        ("1f", None, Labels("default", "default")),
        ("", None, Labels("default", "default")),
        ("chat-1f", {TENANT_PARAM: "acme"}, Labels("acme", "default")),
        ("chat--1f", {TENANT_PARAM: "acme", DOMAIN_PARAM: "code"}, Labels("acme", "code")),
        ("chat--1f", {TENANT_PARAM: 7, DOMAIN_PARAM: ""}, Labels("default", "chat")),
        ("x" * 500 + "--1", {TENANT_PARAM: "y" * 500}, Labels("y" * 128, "x" * 128)),
    ],
)
def test_labels_of(request_id: str, params: dict[str, Any] | None, labels: Labels) -> None:
    assert labels_of(request_id, params) == labels


@pytest.mark.parametrize("given_params", [None, {}, {"temperature": 0.5}, {"custom_params": None}])
def test_a_header_becomes_a_parameter(given_params: dict[str, Any] | None) -> None:
    obj = SimpleNamespace(sampling_params=given_params)
    label_from_headers(None, obj, SimpleNamespace(headers={TENANT_HEADER: "acme"}))
    assert obj.sampling_params == {**(given_params or {}), "custom_params": {TENANT_PARAM: "acme"}}


def test_a_header_wins_over_the_body_and_leaves_the_rest() -> None:
    params = {"custom_params": {TENANT_PARAM: "mine", "other": 1}}
    obj = SimpleNamespace(sampling_params=[params, {}])
    label_from_headers(None, obj, SimpleNamespace(headers={TENANT_HEADER: "acme"}))
    assert obj.sampling_params == [
        {"custom_params": {TENANT_PARAM: "acme", "other": 1}},
        {"custom_params": {TENANT_PARAM: "acme"}},
    ]
    assert params == {"custom_params": {TENANT_PARAM: "mine", "other": 1}}, "the client's own was changed"


def test_without_our_headers_nothing_is_touched() -> None:
    for request in (None, SimpleNamespace(headers={"x-other": "1"})):
        obj = SimpleNamespace(sampling_params=None)
        label_from_headers(None, obj, request)
        assert obj.sampling_params is None


def test_settings_travel_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    tap = TapSettings(ring="r", algorithm="DFLASH", top_logits=3)
    monkeypatch.setenv(TAP_ENV, tap.model_dump_json())
    assert TapSettings.from_environment() == tap
    monkeypatch.setenv(TAP_ENV, '{"ring": "r", "top_logit": 1}')
    with pytest.raises(ValidationError, match="top_logit"):
        TapSettings.from_environment()
    monkeypatch.delenv(TAP_ENV)
    assert TapSettings.from_environment() is None


@settings(deadline=None, max_examples=100)
@given(st.data(), st.integers(1, 12))
def test_tree_parents_undoes_the_linked_lists(data: st.DataObject, size: int) -> None:
    parents = [0] + [data.draw(st.integers(0, node - 1)) for node in range(1, size)]
    child, sibling = np.full(size, -1), np.full(size, -1)
    for node in range(size - 1, 0, -1):
        sibling[node], child[parents[node]] = child[parents[node]], node
    assert tree_parents(child, sibling).tolist() == parents


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.sampled_from([5, 128, 384, 640, 1000, 1920]), st.integers(1, 12), st.booleans())
def test_best_tokens_are_torchs(seed: int, vocab: int, k: int, coarse: bool) -> None:
    """Coarse: few distinct values and masked tokens, so that ties and -inf are common."""
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed))
    if coarse:
        logits = (2 * logits).round()
        logits[logits < 0] = -torch.inf
    values, ids = best_tokens(logits, k)
    torch.testing.assert_close(values, logits.topk(min(k, vocab)).values, rtol=0, atol=0)
    torch.testing.assert_close(logits.gather(1, ids), values, rtol=0, atol=0)
    assert all(len(set(row)) == len(row) for row in ids.tolist())


@pytest.mark.parametrize("k", [0, 2])
def test_the_best_tokens_are_those_where_each_tree_stopped(k: int) -> None:
    logits = torch.randn(2 * 4, 128 * 3, generator=torch.Generator().manual_seed(0))
    accept_index = torch.tensor([[0, 2, -1], [4, 5, 7]], dtype=torch.int32)
    chain = VerifiedTrees.of_chains(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(8, 2), torch.tensor([2, 3]), None)
    trees = VerifiedTrees(
        chain.tokens, chain.fused, accept_index, chain.accept_lens, chain.next_token, chain.next_sibling, logits
    )
    values, ids = trees.best_where_stopped(k)
    expected = logits[[2, 7]].topk(k)
    assert torch.equal(values, expected.values)
    assert torch.equal(ids, expected.indices)
    assert [part.shape for part in chain.best_where_stopped(k)] == [(2, 0), (2, 0)]
