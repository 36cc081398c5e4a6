"""The books: what became of every record, exactly once.

    captured == trained + expired + dropped + held out + pending + deleted

            ┌──────────► dropped    never kept: lost before it came here, refused by privacy, too large, unreadable
    captured┤
            ├─► pending ──► trained     by the first step that used it; it may be kept on, to be replayed
            │      └──────► expired     left unused: too old, or room was needed
            └─► held out ─► expired
    pending, held out and kept trained records ──► deleted    on a user's demand

`captured` is counted at the door and the others at their own transitions, so that the balance is a check. A trained
record that leaves stays counted as trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

Fate = Literal["expired", "dropped", "deleted"]
State = Literal["pending", "held_out", "trained"]

# Workers come and go under new names; the one that was quiet longest is forgotten.
_MAX_SOURCES = 4096


@dataclass(frozen=True)
class Counts:
    """Records; see the module's drawing. kept: those that can still be read, the trained ones among them included."""

    captured: int = 0
    trained: int = 0
    expired: int = 0
    dropped: int = 0
    held_out: int = 0
    pending: int = 0
    deleted: int = 0
    kept: int = 0

    @property
    def balanced(self) -> bool:
        """Whether every captured record is accounted for once."""
        fates = self.trained + self.expired + self.dropped + self.held_out + self.pending + self.deleted
        return self.captured == fates


@dataclass(frozen=True)
class Arrived:
    """A delivery: records that got the ids from `first_id` on, and some that were dropped.

    held_out: one flag a record.  source, sequence: who delivered, and its running number from 1 on; a sequence of 0
    has none.
    """

    first_id: int
    held_out: tuple[bool, ...]
    dropped: int
    source: str
    sequence: int


@dataclass(frozen=True)
class Trained:
    """Records used in an optimiser step."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class Left:
    """Records that are kept no more."""

    ids: tuple[int, ...]
    fate: Fate


Entry = Arrived | Trained | Left
_KINDS: dict[str, type[Entry]] = {"arrived": Arrived, "trained": Trained, "left": Left}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class Ledger:
    """The state after some entries. Pure: where entries are kept is the journal's affair."""

    def __init__(self) -> None:
        self.next_id = 1
        self.states: dict[int, State] = {}
        self._sequences: dict[str, int] = {}
        self._fates: Counter[str] = Counter()

    def has(self, source: str, sequence: int) -> bool:
        """Whether this delivery came before."""
        return 0 < sequence <= self._sequences.get(source, 0)

    def apply(self, entry: Entry) -> None:
        """Raises KeyError for a record that is not kept, ValueError for ids out of order."""
        match entry:
            case Arrived():
                self._arrive(entry)
            case Trained():
                for record in entry.ids:
                    if self.states[record] == "pending":
                        self.states[record] = "trained"
                        self._fates["trained"] += 1
            case Left():
                for record in entry.ids:
                    self._leave(self.states.pop(record), entry.fate)

    def _arrive(self, entry: Arrived) -> None:
        if entry.first_id < self.next_id:
            raise ValueError(f"records from id {entry.first_id} on where {self.next_id} comes next")
        self.next_id = entry.first_id
        for held_out in entry.held_out:
            self.states[self.next_id] = "held_out" if held_out else "pending"
            self.next_id += 1
        self._fates["captured"] += len(entry.held_out) + entry.dropped
        self._fates["dropped"] += entry.dropped
        if entry.sequence:
            self._sequences.pop(entry.source, None)
            self._sequences[entry.source] = entry.sequence
            if len(self._sequences) > _MAX_SOURCES:
                del self._sequences[next(iter(self._sequences))]

    def _leave(self, state: State, fate: Fate) -> None:
        if state != "trained":
            self._fates[fate] += 1
        elif fate == "deleted":
            self._fates["trained"] -= 1
            self._fates["deleted"] += 1

    @property
    def counts(self) -> Counts:
        now = Counter(self.states.values())
        fates = self._fates
        return Counts(
            captured=fates["captured"],
            trained=fates["trained"],
            expired=fates["expired"],
            dropped=fates["dropped"],
            held_out=now["held_out"],
            pending=now["pending"],
            deleted=fates["deleted"],
            kept=len(self.states),
        )

    def to_fields(self) -> dict[str, Any]:
        """All of it, as plain values for msgpack."""
        return {
            "next_id": self.next_id,
            "states": list(self.states.items()),
            "sequences": list(self._sequences.items()),
            "fates": dict(self._fates),
        }

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Ledger:
        """The inverse of `to_fields`."""
        ledger = cls()
        ledger.next_id = values["next_id"]
        ledger.states = dict(values["states"])
        ledger._sequences = dict(values["sequences"])
        ledger._fates = Counter(values["fates"])
        return ledger


def entry_fields(entry: Entry) -> tuple[str, dict[str, Any]]:
    """An entry's kind and its plain values."""
    return _NAMES[type(entry)], {field.name: getattr(entry, field.name) for field in fields(entry)}


def entry_of(kind: str, values: Mapping[str, Any]) -> Entry:
    """The inverse of `entry_fields`. Raises KeyError or TypeError when it is none."""
    return _KINDS[kind](**{name: _frozen(value) for name, value in values.items()})


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else value
