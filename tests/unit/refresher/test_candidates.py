"""One candidate after the other: numbers, decisions, and the same figures in each of its events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftloop.core.config import Config
from draftloop.drafters.metrics import GateScore, RecordScore
from draftloop.refresher.candidates import Candidates, next_version
from draftloop.trainer.trainer import Comparison

POSITIONS = 50


def score(*lengths: float) -> GateScore:
    return GateScore(tuple(RecordScore("chat", POSITIONS, POSITIONS * value) for value in lengths), (0.5,), (0.5,))


def test_a_candidates_events_carry_the_same_figures(tmp_path: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    clock = iter(range(1, 10))

    def emit(kind: Any, **data: Any) -> None:
        events.append((kind, data))

    candidates = Candidates(
        Config(), tmp_path, 7, emit, lambda: float(next(clock)), lambda length: None if length > 1.8 else 100.0 * length
    )
    worse = candidates.judge(Comparison(3, score(1.5, 1.5, 1.5), score(1.25, 1.25, 1.25)))
    better = candidates.judge(Comparison(3, score(1.5, 1.5, 1.5), score(2.0, 2.0, 2.0)))
    candidates.promoted(better)
    assert [(worse.version, worse.decision.promote), (better.version, better.decision.promote)] == [
        ("v7", False),
        ("v8", True),
    ]
    assert better.folder == tmp_path / "v8"
    assert [(kind, data.pop("t_s")) for kind, data in events] == [
        ("candidate", 1.0), ("refused", 2.0), ("candidate", 3.0), ("promoted", 4.0),
    ]  # fmt: skip
    said = [data for _, data in events]
    assert said[1] == said[0] | {"reason": worse.decision.reason}
    assert said[3] == said[2] | {"reason": better.decision.reason}
    assert said[0] == {
        "version": "v7",
        "gate_before": 1.5,
        "gate_after": 1.25,
        "gain_bounds": [-0.25, -0.25],
        "by_domain": {"chat": 1.25 / 1.5 - 1.0},
        "records": 3,
        "tokens_per_s_before": 150.0,
        "tokens_per_s_after": 125.0,
    }
    assert said[2]["tokens_per_s_after"] is None, "nobody knows"


def test_numbers_go_on_from_the_folders(tmp_path: Path) -> None:
    assert next_version(tmp_path) == 1
    for name in ("v2", "v10", "vast", "born"):
        (tmp_path / name).mkdir()
    assert next_version(tmp_path) == 11
