"""One line of the table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """value: None when there is none; the note says why.  share: of the card's measured peak."""

    stage: str
    case: str
    what: str
    value: float | None
    unit: str
    share: float | None = None
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        value = "-" if self.value is None else f"{self.value:.4g}"
        share = "" if self.share is None else f"{self.share:.0%}"
        return (self.stage, self.case, self.what, value, self.unit, share, self.note)

    def json(self) -> dict[str, Any]:
        return asdict(self)
