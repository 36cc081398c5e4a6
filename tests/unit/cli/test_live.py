"""draftloop.cli.live: a panel on a terminal, plain lines elsewhere, and never an exception."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from draftloop.cli.live import LiveView, describe, sparkline

PROGRESS: dict[str, Any] = {
    "t_s": 4.0,
    "phase": "live traffic",
    "requests": 12,
    "failed": 0,
    "tokens_per_s": 81.25,
    "accept_length": 1.43,
    "accept_by_domain": {"code": 1.5},
    "train_steps": 30,
    "loss": 3.2109,
    "version": "v001",
}


def _run(terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=110, color_system=None)
    with LiveView(minutes=1.0, target="tiny", console=console) as view:
        view.event("phase", {"t_s": 0.0, "phase": "starting the server"})
        view.event("progress", PROGRESS)
        view.event("progress", {"t_s": "soon"})
        view.update({**PROGRESS, "requests": 13})
        view.event("swap", {"t_s": 5.0, "version": "v001", "stall_ms": 41.6, "checksum_ok": True})
        view.event("refused", {"t_s": 6.0, "version": "v002", "gate_before": 1.5, "gate_after": 1.4, "reason": "loss"})
        view.event("swap", {})
    return out.getvalue()


def test_a_terminal_gets_one_panel_with_every_figure() -> None:
    text = _run(terminal=True)
    for part in ["tiny", "live traffic", "13", "81.2", "1.43", "3.211", "swapped in v001, stall 42 ms", "refused v002"]:
        assert part in text


def test_elsewhere_there_are_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftloop.cli.live.PLAIN_LINE_EVERY_S", 0.0)
    lines = _run(terminal=False).splitlines()
    assert lines[0].endswith("starting the server")
    assert "requests 12 (0 failed) | 81.2 tokens/s | accepted 1.43 | step 30 loss 3.211" in lines[1]
    assert "swaps 2 refused 1" in lines[-1]
    assert not any("\x1b" in line or "╭" in line for line in lines)


def test_plain_progress_is_rare() -> None:
    progress = [line for line in _run(terminal=False).splitlines() if "requests" in line]
    # Two updates within a moment: the first is printed, then the parting line.
    assert len(progress) == 2


def test_a_failed_checksum_stands_out() -> None:
    assert "DIFFERS" in describe("swap", {"version": "v1", "stall_ms": 1.0, "checksum_ok": False})


def test_sparkline_rises_and_noise_stays_flat() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.5, 2.0]) == "▁▅█"
    assert sparkline([1.0, 1.0, 1.0]) == "▁▁▁"
    assert "█" not in sparkline([1.0, 1.01, 1.02])
