"""Every drafter version of a run: where it came from, what it learnt from, what became of it.

One file, `versions.jsonl`, to which lines are only ever appended, under a lock and flushed to disk; the state is what
one gets by reading it from the top. A writer killed in mid-line leaves a torn last line, which readers skip and the
next writer cuts off. A parent that is not in the file belongs to another run.

    candidate ──► canary ──► promoted ◄──► rolled_back
        │           └──────────────────────────▲
        └──► refused

A writer may be killed before it notes the canary: from candidate, its ends can be reached as well.

Tainted is a mark beside the state: the version learnt from records that were deleted since. It is inherited by all
that came after it, as each continues its parent's weights.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftloop.core.errors import DraftloopError
from draftloop.core.manifest import DrafterKind, Lineage, Manifest

VERSIONS_FILE = "versions.jsonl"

VersionState = Literal["candidate", "canary", "promoted", "refused", "rolled_back"]

_NEXT: dict[VersionState, frozenset[VersionState]] = {
    "candidate": frozenset({"canary", "promoted", "refused", "rolled_back"}),
    "canary": frozenset({"promoted", "rolled_back"}),
    "promoted": frozenset({"promoted", "rolled_back"}),
    "rolled_back": frozenset({"promoted"}),
    "refused": frozenset(),
}


class VersionError(DraftloopError):
    """A version is unknown, known already, or cannot go where it was sent."""


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Version(_Line):
    """One drafter.

    checkpoint: its folder, relative to the registry's.  metrics: the gate's figures.  state_time: when the state was
    entered (seconds since the epoch).  reason: why, in one line.  tainted: why, or None.
    """

    name: str
    parent: str | None
    kind: DrafterKind
    checkpoint: str
    created: float
    lineage: Lineage = Field(default_factory=Lineage)
    metrics: dict[str, float] = Field(default_factory=dict)
    state: VersionState = "candidate"
    state_time: float = 0.0
    reason: str = ""
    tainted: str | None = None


class _Added(_Line):
    event: Literal["added"] = "added"
    version: Version


class _Moved(_Line):
    event: Literal["moved"] = "moved"
    name: str
    state: VersionState
    time: float
    reason: str


class _Tainted(_Line):
    event: Literal["tainted"] = "tainted"
    name: str
    reason: str


class _AnyLine(_Line):
    line: _Added | _Moved | _Tainted = Field(discriminator="event")


class VersionRegistry:
    """The versions in `folder`. Every method reads the file anew, so that several processes may hold one each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / VERSIONS_FILE

    def all(self) -> list[Version]:
        """Every version, oldest first. Raises VersionError when the file is damaged."""
        return list(self._read().values())

    def get(self, name: str) -> Version:
        """Raises VersionError when there is no such version."""
        return _known(self._read(), name)

    def serving(self) -> Version | None:
        """The version promoted last and not rolled back since: what a restarted worker comes back with."""
        promoted = [version for version in self._read().values() if version.state == "promoted"]
        return max(promoted, key=lambda version: version.state_time, default=None)

    def checkpoint(self, name: str) -> Path:
        return self.folder / self.get(name).checkpoint

    def add(self, checkpoint: Path, metrics: dict[str, float] | None = None) -> Version:
        """Enter the drafter in `checkpoint` as a candidate, as its manifest describes it. metrics: over the manifest's.

        Raises VersionError when its name is taken, ManifestError when the folder holds no drafter.
        """
        manifest = Manifest.load(checkpoint)
        version = Version(
            name=manifest.version,
            parent=manifest.parent,
            kind=manifest.kind,
            checkpoint=os.path.relpath(checkpoint, self.folder),
            created=manifest.created,
            lineage=manifest.lineage,
            metrics=manifest.metrics | (metrics or {}),
            state_time=time.time(),
        )
        with self._writing() as (file, known):
            if version.name in known:
                raise VersionError(f"{self._path} has a version {version.name} already; a version is never replaced")
            parent = None if version.parent is None else known.get(version.parent)
            if parent is not None:
                version.tainted = parent.tainted
            _append(file, _Added(version=version))
        return version

    def knows(self, name: str) -> bool:
        return name in self._read()

    def move(self, name: str, state: VersionState, reason: str) -> None:
        """Send a version to another state. Raises VersionError when it is unknown or cannot go there."""
        with self._writing() as (file, known):
            _check_move(_known(known, name), state)
            _append(file, _moved(known, name, state, reason))

    def restorable(self) -> list[str]:
        """The versions that may serve again, oldest first."""
        return [name for name, version in self._read().items() if self._why_not(version) is None]

    def check_restorable(self, name: str) -> Version:
        """The version, when it may serve again. Raises VersionError in one line when it may not."""
        version = self.get(name)
        if (why := self._why_not(version)) is not None:
            raise VersionError(f"version {name} {why}")
        return version

    def _why_not(self, version: Version) -> str | None:
        if version.state not in ("promoted", "rolled_back"):
            return f"never served (it is {_said(version.state)}); choose one that did"
        if version.tainted is not None:
            return f"is tainted: {version.tainted}; choose one from before those records"
        if not (self.folder / version.checkpoint).is_dir():
            return f"has lost its checkpoint {self.folder / version.checkpoint}"
        return None

    def roll_back(self, name: str, reason: str) -> None:
        """`name` serves again, and whatever was promoted after it is rolled back. Call `check_restorable` before the
        fleet is given it, and this when the fleet has it.

        Raises VersionError when it is unknown or was refused.
        """
        with self._writing() as (file, known):
            _check_move(_known(known, name), "promoted")
            names = list(known)
            for later in names[names.index(name) + 1 :]:
                if known[later].state in ("promoted", "canary"):
                    _append(file, _moved(known, later, "rolled_back", reason))
            _append(file, _moved(known, name, "promoted", reason))

    def taint(self, learnt: Callable[[str], bool], reason: str) -> list[str]:
        """Mark the versions for whose name `learnt` is true, and all that descend from them; returns the new ones."""
        with self._writing() as (file, known):
            marked: list[str] = []
            for version in known.values():
                if version.tainted is not None:
                    continue
                parent = known.get(version.parent) if version.parent is not None else None
                if learnt(version.name) or (parent is not None and parent.tainted is not None):
                    version.tainted = reason
                    _append(file, _Tainted(name=version.name, reason=reason))
                    marked.append(version.name)
        return marked

    def _read(self) -> dict[str, Version]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as err:
            raise VersionError(f"cannot read {self._path}: {err.strerror}") from None
        return self._fold(data[: data.rfind(b"\n") + 1].splitlines())

    def _fold(self, lines: Iterable[bytes]) -> dict[str, Version]:
        known: dict[str, Version] = {}
        for number, text in enumerate(lines, 1):
            try:
                _apply(known, _AnyLine.model_validate_json(b'{"line":' + text + b"}").line)
            except (ValidationError, KeyError):
                raise VersionError(
                    f"{self._path} line {number} is not a version entry; restore the file or move it away to start anew"
                ) from None
        return known

    @contextmanager
    def _writing(self) -> Iterator[tuple[BinaryIO, dict[str, Version]]]:
        """The locked file, at the end of its last whole line, and what it says."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                data = file.read()
                whole = data.rfind(b"\n") + 1
                file.truncate(whole)
                yield file, self._fold(data[:whole].splitlines())
                file.flush()
                os.fsync(file.fileno())
        except OSError as err:
            raise VersionError(f"cannot write {self._path}: {err.strerror}") from None


def differences(before: Version, after: Version) -> list[tuple[str, str, str]]:
    """(what, in `before`, in `after`) of every field, metric and domain count that differs, for people."""
    one, other = _flat(before), _flat(after)
    return [
        (name, one.get(name, "-"), other.get(name, "-"))
        for name in dict.fromkeys((*one, *other))
        if one.get(name) != other.get(name)
    ]


def _flat(version: Version) -> dict[str, str]:
    fields: dict[str, Any] = version.model_dump()
    lineage = fields.pop("lineage")
    for domain, records in sorted(lineage.pop("domains").items()):
        fields[f"records of {domain}"] = records
    fields |= {f"trained {name}": value for name, value in lineage.items()}
    fields |= {f"gate {name}": value for name, value in fields.pop("metrics").items()}
    return {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in fields.items()}


def _apply(known: dict[str, Version], line: _Added | _Moved | _Tainted) -> None:
    match line:
        case _Added():
            known[line.version.name] = line.version
        case _Moved():
            version = known[line.name]
            version.state, version.state_time, version.reason = line.state, line.time, line.reason
        case _Tainted():
            known[line.name].tainted = line.reason


def _known(known: dict[str, Version], name: str) -> Version:
    if name not in known:
        names = ", ".join(list(known)[-5:]) or "none yet"
        raise VersionError(f"there is no version {name}; the newest known: {names}")
    return known[name]


def _check_move(version: Version, state: VersionState) -> None:
    if state not in _NEXT[version.state]:
        raise VersionError(f"version {version.name} is {_said(version.state)} and cannot become {_said(state)}")


def _moved(known: dict[str, Version], name: str, state: VersionState, reason: str) -> _Moved:
    """Times never go back, so that the newest promotion is always the one written last."""
    newest = max(version.state_time for version in known.values())
    line = _Moved(name=name, state=state, time=max(time.time(), newest + 1e-6), reason=reason)
    _apply(known, line)
    return line


def _said(state: VersionState) -> str:
    return state.replace("_", " ")


def _append(file: BinaryIO, line: BaseModel) -> None:
    file.write(line.model_dump_json().encode() + b"\n")
