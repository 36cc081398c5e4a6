"""Which requests are captured: labels, sampling, the byte budget, and a policy that changes meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.capture.admission import MOST_REQUESTS, Admission, ByteBudget, Labels, Verdict, is_sampled, wants
from draftloop.capture.buffer import is_held_out
from draftloop.capture.control import CONTROL_BYTES, ControlBlock
from draftloop.core.config import CapturePolicy

IDS = [f"chat--{i}" for i in range(4000)]
ACME, OTHER = Labels("acme", "chat"), Labels("other", "code")


class Desk:
    """An admission with its control block and a clock that is set by hand."""

    def __init__(self, policy: CapturePolicy | None = None) -> None:
        self.control = ControlBlock(memoryview(bytearray(CONTROL_BYTES)))
        self.now = 100.0
        self.admission = Admission(self.control, lambda: self.now)
        if policy is not None:
            self.set(policy)

    def set(self, policy: CapturePolicy, sent: int = 0) -> list[str]:
        self.control.publish(policy.model_dump_json().encode())
        return self.admission.refresh(sent)


def test_the_choice_is_the_same_in_every_process() -> None:
    """Written down once: another hash would split a request between two workers or two runs."""
    assert [is_sampled(request_id, 0.5) for request_id in IDS[:8]] == [
        False, False, True, True, False, False, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_share_is_as_asked(rate: float) -> None:
    share = sum(is_sampled(request_id, rate) for request_id in IDS) / len(IDS)
    assert share == pytest.approx(rate, abs=0.025)
    if rate in (0.0, 1.0):
        assert share == rate


def test_a_request_captured_at_a_low_rate_is_captured_at_a_higher_one() -> None:
    assert all(is_sampled(request_id, 0.6) for request_id in IDS if is_sampled(request_id, 0.2))


def test_sampling_does_not_choose_the_held_out_records() -> None:
    captured = [request_id for request_id in IDS if is_sampled(request_id, 0.1)]
    share = sum(is_held_out(request_id, 0.2) for request_id in captured) / len(captured)
    assert share == pytest.approx(0.2, abs=0.08)


_NAMES = st.sampled_from(["a", "b", "c"])
_LISTS = st.frozensets(_NAMES)


@given(_NAMES, _NAMES, st.none() | _LISTS, _LISTS, st.none() | _LISTS, _LISTS)
def test_an_opt_out_wins_over_an_opt_in(
    tenant: str,
    domain: str,
    tenants: frozenset[str] | None,
    skip_tenants: frozenset[str],
    domains: frozenset[str] | None,
    skip_domains: frozenset[str],
) -> None:
    policy = CapturePolicy(tenants=tenants, skip_tenants=skip_tenants, domains=domains, skip_domains=skip_domains)
    expected = True
    for name, only, never in ((tenant, tenants, skip_tenants), (domain, domains, skip_domains)):
        if only is not None and name not in only:
            expected = False
        if name in never:
            expected = False
    assert wants(policy, Labels(tenant, domain)) is expected


def test_nothing_is_captured_before_a_policy_is_known() -> None:
    desk = Desk()
    assert desk.admission.refresh(0) == []
    assert desk.admission.begin("r", ACME, 0) is Verdict.UNWANTED


def test_a_fate_holds_to_the_end_of_the_request() -> None:
    desk = Desk(CapturePolicy(tenants=frozenset({"acme"})))
    assert desk.admission.begin("in", ACME, 0) is Verdict.CAPTURED
    assert desk.admission.begin("out", OTHER, 0) is Verdict.UNWANTED
    assert desk.set(CapturePolicy(sample_rate=0.0)) == []
    assert (desk.admission.labels("in"), desk.admission.labels("out")) == (ACME, None)
    assert desk.set(CapturePolicy()) == []
    assert (desk.admission.labels("in"), desk.admission.labels("out")) == (ACME, None)
    assert desk.admission.knows("out")
    assert (desk.admission.end("in"), desk.admission.end("out"), desk.admission.end("never")) == (True, False, False)
    assert not desk.admission.knows("in")
    assert not desk.admission.knows("out")


def test_an_opt_out_withdraws_what_runs() -> None:
    desk = Desk(CapturePolicy())
    for name, labels in (("a", ACME), ("b", OTHER), ("c", ACME)):
        desk.admission.begin(name, labels, 0)
    assert desk.admission.refresh(0) == []
    assert desk.set(CapturePolicy(skip_tenants=frozenset({"acme"}))) == ["a", "c"]
    assert desk.admission.labels("a") is None
    assert desk.admission.labels("b") == OTHER
    # Allowed again, but the record would have a hole.
    assert desk.set(CapturePolicy()) == []
    assert desk.admission.labels("a") is None
    assert desk.admission.end("a") is False


def test_a_policy_caught_half_written_changes_nothing() -> None:
    desk = Desk(CapturePolicy())
    whole = desk.control.read
    desk.control.publish(CapturePolicy(sample_rate=0.0).model_dump_json().encode())
    desk.control.read = lambda: None  # type: ignore[method-assign]
    assert desk.admission.refresh(0) == []
    assert desk.admission.begin("a", ACME, 0) is Verdict.CAPTURED
    desk.control.read = whole  # type: ignore[method-assign]
    desk.admission.refresh(0)
    assert desk.admission.begin("b", ACME, 0) is Verdict.UNWANTED


def test_the_number_of_known_requests_is_bounded() -> None:
    desk = Desk(CapturePolicy())
    for number in range(MOST_REQUESTS + 3):
        desk.admission.begin(str(number), ACME, 0)
    assert [desk.admission.knows(str(number)) for number in (0, 2, 3, MOST_REQUESTS)] == [False, False, True, True]


def test_a_record_begun_is_kept_whole_and_its_debt_is_paid_first() -> None:
    desk = Desk(CapturePolicy(max_bytes_per_s=1000))
    assert desk.admission.begin("a", ACME, 0) is Verdict.CAPTURED
    # It took 3500 bytes: 2500 of debt, paid after two and a half seconds.
    for wait, verdict in ((1.0, Verdict.THROTTLED), (1.5, Verdict.THROTTLED), (0.1, Verdict.CAPTURED)):
        desk.now += wait
        assert desk.admission.begin(f"at {desk.now}", ACME, 3500) is verdict
    assert desk.admission.labels("a") == ACME
    desk.set(CapturePolicy(), 3500)
    assert desk.admission.begin("free", ACME, 10**12) is Verdict.CAPTURED


def test_what_the_policy_does_not_want_is_not_counted_as_throttled() -> None:
    desk = Desk(CapturePolicy(max_bytes_per_s=1, sample_rate=0.5))
    desk.admission.begin("chat--2", ACME, 0)
    verdicts = [desk.admission.begin(request_id, ACME, 10**6) for request_id in IDS[3:8]]
    assert verdicts == [Verdict.THROTTLED, *[Verdict.UNWANTED] * 2, *[Verdict.THROTTLED] * 2]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10_000), st.lists(st.tuples(st.floats(0, 3), st.integers(0, 20_000)), min_size=1, max_size=60))
def test_the_rate_holds_over_any_stretch(rate: int, records: list[tuple[float, int]]) -> None:
    """From any admission to any later one: at most one second's bytes, the rate, and the record that went into debt."""
    budget, now, sent = ByteBudget(rate, 0.0, 0), 0.0, 0
    admitted: list[tuple[float, int]] = []
    for wait, size in records:
        now += wait
        if budget.allows(now, sent):
            admitted.append((now, size))
            sent += size
    for first in range(len(admitted)):
        for last in range(first, len(admitted)):
            stretch = admitted[first : last + 1]
            before_last = sum(size for _, size in stretch[:-1])
            assert before_last <= rate + rate * (stretch[-1][0] - stretch[0][0]) + 1e-6 * (1 + before_last)
