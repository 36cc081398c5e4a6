"""draftloop.cli.report: a self-contained page from whatever a run left behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from draftloop.cli.report import write_report
from draftloop.cli.run_events import parse_events
from draftloop.core.errors import DraftloopError
from draftloop.core.events import Event
from draftloop.core.summary import (
    AcceptLength,
    CaptureOverhead,
    DrafterSummary,
    NearTie,
    OverheadPair,
    RefusedSummary,
    Summary,
    SwapSummary,
    TokensPerSecond,
    Versions,
)

SPECULATION_CHARTS = ("chart-reliability", "chart-shapes")
CHARTS = ("chart-accept", "chart-domains", "chart-loss", "chart-speed", "chart-stalls")

EVENTS = [
    Event(kind="phase", data={"t_s": 0.0, "phase": "day 0"}),
    Event(kind="measured", data={"t_s": 9.0, "what": "day0", "accept_length": 1.0, "by_domain": {"code": 1.0}}),
    *(
        Event(
            kind="progress",
            data={
                "t_s": 10.0 + 2 * index,
                "phase": "live",
                "requests": index,
                "accept_length": 1.0 + index / 10,
                "accept_by_domain": {"code": 1.1, "chat": None},
                "train_steps": index,
                "loss": 5.0 - index / 10,
                "version": "v000",
            },
        )
        for index in range(8)
    ),
    Event(kind="train_step", data={"t_s": 12.0, "step": 1, "loss": 5.0, "step_accuracy": [0.2, 0.1], "tokens": 64}),
    Event(kind="refused", data={"t_s": 15.0, "version": "v001", "gate_before": 1.0, "reason": "no gain"}),
    Event(kind="swap", data={"t_s": 20.0, "version": "v002", "stall_ms": 41.0, "checksum_ok": True, "copy_ms": 9.0}),
    Event(kind="drift", data={"t_s": 22.0, "signal": "domain_mix", "action": "train", "before": 0.0, "now": 0.4}),
    Event(kind="server_started", data={"port": 1}),
    Event(
        kind="speculation",
        data={
            "t_s": 25.0,
            "reliability": [[[0.1, 0.08, 40.0], [0.8, 0.6, 12.0]], [[0.2, 0.1, 9.0]]],
            "calibration_error": [0.05, 0.1],
            "steps": {"1": {"3x4/8": 30, "1x4/2": 10}, "16": {"plain": 50}},
            "cost_error": None,
        },
    ),
]


def _summary() -> Summary:
    return Summary(
        status="finished",
        target="tiny <model>",
        drafter=DrafterSummary(kind="eagle3", versions=["v000", "v002"]),
        device="cpu",
        versions=Versions(sglang="0.5.23", torch="2.14.1", transformers="5.19.0", ray="2.60.0"),
        seed=0,
        minutes=1.0,
        elapsed_s=30.0,
        requests=8,
        swaps=[SwapSummary(version="v002", time_s=20.0, gate_before=1.0, gate_after=1.5, stall_ms=41.0)],
        refused=[RefusedSummary(version="v001", time_s=15.0, gate_before=1.0, gate_after=0.98, reason="no <gain>")],
        accept_length=AcceptLength(day0=1.0, final=1.91),
        tokens_per_s=TokensPerSecond(plain=20.0, day0=10.0, final=25.0),
        token_identical=True,
        compared=32,
        compared_tokens=2048,
        near_ties=[NearTie(prompt=1, position=2, gap=1e-4)],
        capture_overhead=CaptureOverhead(ratio_on_off=0.96, pairs=[OverheadPair(on=96.0, off=100.0)]),
    )


def _empty(status: str) -> Summary:
    whole = _summary().model_dump(include={"target", "device", "versions", "seed", "minutes"})
    return Summary.model_validate(
        {**whole, "status": status, "drafter": {"kind": "eagle3"}, "resume": "draftloop demo --out <dir>"}
    )


def _page(folder: Path, summary: Summary, events: list[Event]) -> str:
    """The page without plotly's own code, which is full of addresses it does not use."""
    page = write_report(folder, summary, events).read_text(encoding="utf-8")
    assert page.count(get_plotlyjs()) == 1
    return page.replace(get_plotlyjs(), "")


def _drawn(page: str) -> set[str]:
    return set(re.findall(r'Plotly\.newPlot\(\s*"([\w-]+)"', page))


def test_every_chart_and_headline_is_there(tmp_path: Path) -> None:
    page = _page(tmp_path, _summary(), EVENTS)
    assert _drawn(page) == {*CHARTS, *SPECULATION_CHARTS}
    for text in ["1.91", "1.25×", ">Yes<", "32 greedy outputs, 2,048 tokens", "4.0 %", "v002", "+0.50", "Near ties"]:
        assert text in page
    assert "tiny &lt;model&gt;" in page
    assert "no &lt;gain&gt;" in page
    assert "domain mix: train" in page


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    page = _page(tmp_path, _summary(), EVENTS)
    assert re.findall(r"""(?:src|href)\s*=\s*["']?(?!data:)""", page) == []
    assert "url(" not in page
    assert "@import" not in page
    assert "<link" not in page
    assert "default-src 'none'" in page


@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_a_run_cut_short_shows_what_there_is_and_says_so(tmp_path: Path, status: str) -> None:
    page = _page(tmp_path, _empty(status), EVENTS[:6])
    assert _drawn(page) == {"chart-accept", "chart-domains", "chart-loss"}
    assert "No data in this run" in page
    assert "not measured" in page
    assert "draftloop demo --out &lt;dir&gt;" in page


def test_a_run_without_events_is_a_valid_page(tmp_path: Path) -> None:
    page = _page(tmp_path, _empty("failed"), [])
    assert _drawn(page) == set()
    assert all(f'id="{chart}"' in page for chart in CHARTS)
    assert page.endswith("</html>\n")


def test_differing_tokens_are_not_hidden(tmp_path: Path) -> None:
    page = _page(tmp_path, _summary().model_copy(update={"token_identical": False}), EVENTS)
    assert ">No<" in page
    assert ">Yes<" not in page


def test_a_bad_event_is_counted_not_fatal(tmp_path: Path) -> None:
    events = [*EVENTS, Event(kind="swap", data={"t_s": "soon"})]
    assert parse_events(events).unreadable == 1
    assert "1 could not be read" in _page(tmp_path, _summary(), events)


def test_a_folder_that_is_gone_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(DraftloopError, match="cannot write"):
        write_report(tmp_path / "gone", _summary(), EVENTS)
