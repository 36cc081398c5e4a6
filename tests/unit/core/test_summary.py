"""draftloop.core.summary: round trip, partial runs, whole-or-nothing writing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftloop.core.errors import DraftloopError
from draftloop.core.summary import (
    AcceptLength,
    BeforeAfter,
    CaptureOverhead,
    DrafterSummary,
    NearTie,
    OverheadPair,
    RefusedSummary,
    Summary,
    SwapSummary,
    TokensPerSecond,
    Versions,
    write_atomic,
)

VERSIONS = Versions(sglang="0.5.23", torch="2.14.1", transformers="5.19.0", ray="2.60.0")


def _started() -> Summary:
    return Summary(
        status="interrupted",
        target="tiny",
        drafter=DrafterSummary(kind="eagle3"),
        device="cpu",
        versions=VERSIONS,
        seed=0,
        minutes=18.0,
        resume="draftloop demo --out runs/demo",
    )


def test_a_full_summary_round_trips(tmp_path: Path) -> None:
    summary = _started().model_copy(
        update={
            "status": "finished",
            "swaps": [
                SwapSummary(version="v1", time_s=9.0, gate_before=1.0, gate_after=1.2, stall_ms=4.0, checksum_ok=True)
            ],
            "refused": [RefusedSummary(version="v2", time_s=12.0, gate_before=1.2, gate_after=1.1, reason="no gain")],
            "accept_length": AcceptLength(day0=1.0, final=1.9, by_domain={"code": BeforeAfter(day0=1.0, final=2.0)}),
            "tokens_per_s": TokensPerSecond(plain=20.0, day0=9.0, final=24.0),
            "token_identical": True,
            "compared": 64,
            "compared_tokens": 4096,
            "near_ties": [NearTie(prompt=3, position=17, gap=2e-4)],
            "capture_overhead": CaptureOverhead(ratio_on_off=0.97, pairs=[OverheadPair(on=97.0, off=100.0)]),
        }
    )
    assert summary.save(tmp_path) == tmp_path / "summary.json"
    assert Summary.load(tmp_path) == summary


def test_what_a_cut_short_run_did_not_measure_is_null(tmp_path: Path) -> None:
    _started().save(tmp_path)
    raw = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert raw["token_identical"] is None
    assert raw["accept_length"] == {"day0": None, "final": None, "by_domain": {}}
    assert raw["tokens_per_s"] == {"day0": None, "final": None, "plain": None}
    assert raw["capture_overhead"] == {"ratio_on_off": None, "pairs": []}


def test_loading_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DraftloopError, match=r"summary\.json"):
        Summary.load(tmp_path)
    (tmp_path / "summary.json").write_text('{"status": "finished"}', encoding="utf-8")
    with pytest.raises(DraftloopError) as error:
        Summary.load(tmp_path)
    assert "\n" not in str(error.value)


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "new \ud800")
    assert path.read_text(encoding="utf-8") == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_a_missing_folder_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(DraftloopError, match="cannot write") as error:
        _started().save(tmp_path / "gone")
    assert "\n" not in str(error.value)


def test_a_full_disk_is_one_clear_line() -> None:
    with pytest.raises(DraftloopError, match="cannot write"):
        write_atomic(Path("/dev/full/summary.json"), "x")
