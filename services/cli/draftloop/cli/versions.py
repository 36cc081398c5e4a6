"""`draftloop versions` and `versions diff`: a run's drafters, where they came from and what became of them."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from draftloop.core.errors import DraftloopError
from draftloop.core.versions import VERSIONS_FILE, Version, VersionRegistry, differences


def show_versions(run: Path, console: Console) -> None:
    """Print the table. Raises DraftloopError when the run has no registry."""
    registry = _registry(run)
    serving = registry.serving()
    table = Table("version", "parent", "state", "since", "records", "domains", "data from", "gate", "why")
    for version in registry.all():
        name = f"{version.name} *" if serving is not None and version.name == serving.name else version.name
        table.add_row(name, version.parent or "-", *_cells(version))
    console.print(table)
    console.print("* serves")


def show_difference(run: Path, one: str, other: str, console: Console) -> None:
    """Print what differs between two versions. Raises VersionError when there is no such version."""
    registry = _registry(run)
    table = Table("", one, other)
    for row in differences(registry.get(one), registry.get(other)):
        table.add_row(*row)
    console.print(table)


def _registry(run: Path) -> VersionRegistry:
    if not (run / VERSIONS_FILE).exists():
        raise DraftloopError(f"{run} has no {VERSIONS_FILE}: is it the folder of a run?")
    return VersionRegistry(run)


def _cells(version: Version) -> tuple[str, ...]:
    lineage = version.lineage
    state = version.state.replace("_", " ") + (", tainted" if version.tainted is not None else "")
    domains = ", ".join(f"{name} {count}" for name, count in sorted(lineage.domains.items()))
    span = f"{_clock(lineage.first_record_time)} to {_clock(lineage.last_record_time)}" if lineage.records else "-"
    gate = f"{version.metrics['accept_length']:.2f}" if "accept_length" in version.metrics else "-"
    return (
        state,
        _clock(version.state_time),
        str(lineage.records),
        domains,
        span,
        gate,
        version.tainted or version.reason,
    )


def _clock(seconds: float | None) -> str:
    return "-" if seconds is None else time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))
