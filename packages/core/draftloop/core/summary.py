"""`summary.json`: the figures of one run, for people, reports and checks.

Times are seconds since the run started unless a name says otherwise. A field that a run did not get to
measure is None (or an empty list), so a summary of an interrupted run is as valid as a finished one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftloop.core.errors import DraftloopError

SUMMARY_FILE = "summary.json"

RunStatus = Literal["finished", "interrupted", "failed"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DrafterSummary(_Part):
    """kind: 'eagle3' and so on. versions: every version that served, oldest first."""

    kind: str
    versions: list[str] = Field(default_factory=list)


class SwapSummary(_Part):
    """A candidate that went into service.

    gate_before, gate_after: expected accepted length of the serving drafter and of the candidate on the same
    held-out records. stall_ms: how long serving stood still. checksum_ok: the server's weights equal the file's.
    """

    version: str
    time_s: float
    gate_before: float | None = None
    gate_after: float | None = None
    stall_ms: float | None = None
    checksum_ok: bool | None = None


class RefusedSummary(_Part):
    """A candidate that the gate, or the watch after a swap, turned down."""

    version: str
    time_s: float
    gate_before: float | None = None
    gate_after: float | None = None
    reason: str


class BeforeAfter(_Part):
    """One figure for the day-0 drafter and for the one that served last."""

    day0: float | None = None
    final: float | None = None


class AcceptLength(BeforeAfter):
    """Mean tokens per target step (1.0 = no draft accepted), greedy, on held-out prompts."""

    by_domain: dict[str, BeforeAfter] = Field(default_factory=dict)


class TokensPerSecond(BeforeAfter):
    """Generated tokens per second at batch 1 on the same prompts. plain: no speculation."""

    plain: float | None = None


class NearTie(_Part):
    """A first difference from plain decoding where plain's own two best logits were `gap` (<= 1e-3) apart.

    prompt: index among the held-out prompts. position: generated token index, 0-based.
    """

    prompt: int
    position: int
    gap: float


class OverheadPair(_Part):
    """Serving throughput in tokens/s of one paired run, capture on and off."""

    on: float
    off: float


class CaptureOverhead(_Part):
    """ratio_on_off: throughput with capture divided by throughput without (1.0 = free)."""

    ratio_on_off: float | None = None
    pairs: list[OverheadPair] = Field(default_factory=list)


class Versions(_Part):
    """The installed releases that the figures depend on."""

    sglang: str
    torch: str
    transformers: str
    ray: str


class Summary(_Part):
    """The whole of `summary.json`.

    token_identical: True only when every compared greedy output equals plain decoding's; None = not measured.
    compared: prompts compared. compared_tokens: generated tokens compared over all of them.
    minutes: the budget the run was given. elapsed_s: what it took.
    resume: what to type to go on from an interrupted or failed run.
    """

    format: Literal[1] = 1
    status: RunStatus
    target: str
    drafter: DrafterSummary
    device: str
    versions: Versions
    seed: int
    minutes: float
    elapsed_s: float = 0.0
    requests: int = 0
    failed_requests: int = 0
    tokens_captured: int = 0
    records_dropped: int = 0
    train_steps: int = 0
    swaps: list[SwapSummary] = Field(default_factory=list)
    refused: list[RefusedSummary] = Field(default_factory=list)
    accept_length: AcceptLength = Field(default_factory=AcceptLength)
    tokens_per_s: TokensPerSecond = Field(default_factory=TokensPerSecond)
    token_identical: bool | None = None
    compared: int = 0
    compared_tokens: int = 0
    near_ties: list[NearTie] = Field(default_factory=list)
    capture_overhead: CaptureOverhead = Field(default_factory=CaptureOverhead)
    resume: str | None = None

    def save(self, folder: Path) -> Path:
        """Write `folder`/summary.json, whole or not at all. Raises DraftloopError when it cannot be written."""
        path = folder / SUMMARY_FILE
        write_atomic(path, self.model_dump_json(indent=2) + "\n")
        return path

    @classmethod
    def load(cls, folder: Path) -> Summary:
        """Read `folder`/summary.json. Raises DraftloopError in one line."""
        path = folder / SUMMARY_FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as err:
            raise DraftloopError(f"cannot read {path}: {err.strerror}; is {folder} the folder of a run?") from None
        except ValidationError as err:
            first = err.errors()[0]
            where = ".".join(str(p) for p in first["loc"]) or "the file"
            raise DraftloopError(f"{path} is not a valid summary: {where}: {first['msg']}") from None


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text` (UTF-8), so that a reader sees the old file or the new one.

    Raises DraftloopError when the folder is missing, full or read-only; the old file is then untouched.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as err:
        raise DraftloopError(
            f"cannot write {path}: {err.strerror}; free some space or choose a folder you may write to"
        ) from None
