"""What the gate says about one candidate after the other: each gets a number, a decision and its events."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftloop.core.config import Config
from draftloop.fleet.fleet import Emit
from draftloop.refresher.gate import Decision, decide
from draftloop.trainer.trainer import Comparison


@dataclass(frozen=True)
class Trial:
    """A candidate's version, the gate's decision, and the folder it is to be saved in when it may serve."""

    version: str
    folder: Path
    decision: Decision
    figures: dict[str, Any]


class Candidates:
    """Of the loop and of a replay alike. first: number of the first one.  now: seconds since the run started.
    predict: tokens/s by accepted length, None while nobody knows."""

    def __init__(
        self,
        config: Config,
        checkpoints: Path,
        first: int,
        emit: Emit,
        now: Callable[[], float],
        predict: Callable[[float], float | None],
    ) -> None:
        self._config = config
        self._checkpoints = checkpoints
        self._next = first
        self._emit = emit
        self._now = now
        self._predict = predict

    def judge(self, comparison: Comparison) -> Trial:
        """Decide on the next candidate, and say so; a refused one has had its say then."""
        version = f"v{self._next}"
        self._next += 1
        before, after = comparison.before, comparison.after
        decision = decide(before, after, self._config.gate, self._config.seed + self._next)
        trial = Trial(version, self._checkpoints / version, decision, self._figures(version, comparison, decision))
        self._emit("candidate", t_s=self._now(), **trial.figures)
        if not decision.promote:
            self._emit("refused", t_s=self._now(), reason=decision.reason, **trial.figures)
        return trial

    def promoted(self, trial: Trial) -> None:
        """Say that the candidate, saved, goes into service."""
        self._emit("promoted", t_s=self._now(), reason=trial.decision.reason, **trial.figures)

    def _figures(self, version: str, comparison: Comparison, decision: Decision) -> dict[str, Any]:
        """Accepted lengths, bounds of the gain, change by domain, predicted tokens/s."""
        before, after = comparison.before.accept_length, comparison.after.accept_length
        gain = decision.gain
        return {
            "version": version,
            "gate_before": before,
            "gate_after": after,
            "gain_bounds": [] if gain is None or not math.isfinite(gain.low) else [gain.low, gain.high],
            "by_domain": decision.by_domain,
            "records": comparison.records,
            "tokens_per_s_before": self._predict(before),
            "tokens_per_s_after": self._predict(after),
        }


def next_version(checkpoints: Path) -> int:
    """One more than the highest number of a folder vN."""
    return 1 + max((int(path.name[1:]) for path in checkpoints.glob("v*") if path.name[1:].isdigit()), default=0)
