"""What the tap decides from a request id alone, and how it reads SGLang's linked trees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from draftloop.capture.buffer import is_held_out
from draftloop.sglang.tap import TAP_ENV, TapSettings, domain_of, is_captured, tree_parents

IDS = [f"chat--{i}" for i in range(4000)]


@pytest.mark.parametrize(
    ("request_id", "domain"),
    [
        ("chat--1f", "chat"),
        ("my-tenant--1--2", "my-tenant"),
        ("--1f", "default"),
        ("1f", "default"),
        ("", "default"),
        ("chat-1f", "default"),
    ],
)
def test_domain_of(request_id: str, domain: str) -> None:
    assert domain_of(request_id) == domain


def test_the_choice_is_the_same_in_every_process() -> None:
    """Written down once: another hash would split a request between two workers or two runs."""
    tap = TapSettings(ring="r", sample_rate=0.5)
    assert [is_captured(request_id, tap) for request_id in IDS[:8]] == [
        False, False, True, True, False, False, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_share_is_as_asked(rate: float) -> None:
    share = sum(is_captured(request_id, TapSettings(ring="r", sample_rate=rate)) for request_id in IDS) / len(IDS)
    assert share == pytest.approx(rate, abs=0.025)
    if rate in (0.0, 1.0):
        assert share == rate


def test_a_request_captured_at_a_low_rate_is_captured_at_a_higher_one() -> None:
    low, high = (TapSettings(ring="r", sample_rate=rate) for rate in (0.2, 0.6))
    assert all(is_captured(request_id, high) for request_id in IDS if is_captured(request_id, low))


def test_sampling_does_not_choose_the_held_out_records() -> None:
    tap = TapSettings(ring="r", sample_rate=0.1)
    captured = [request_id for request_id in IDS if is_captured(request_id, tap)]
    share = sum(is_held_out(request_id, 0.2) for request_id in captured) / len(captured)
    assert share == pytest.approx(0.2, abs=0.08)


def test_an_opted_out_domain_is_never_captured() -> None:
    tap = TapSettings(ring="r", skip_domains=("heldout",))
    assert not any(is_captured(f"heldout--{i}", tap) for i in range(200))
    assert is_captured("heldout2--1", tap)
    assert is_captured("heldout-1", tap)


def test_settings_travel_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    tap = TapSettings(ring="r", sample_rate=0.25, skip_domains=("a", "b"))
    monkeypatch.setenv(TAP_ENV, tap.model_dump_json())
    assert TapSettings.from_environment() == tap
    monkeypatch.setenv(TAP_ENV, '{"ring": "r", "sample_rte": 1}')
    with pytest.raises(ValidationError, match="sample_rte"):
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
