"""`draftloop status` on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show_status(status: dict[str, Any]) -> None:
    """Print a controller's status (`refresher.controller.Controller.status`, `refresher.training.Training.status`)."""
    console = Console()
    table = Table("worker", "phase", "version", "running", "routed", "server", box=None)
    routed = set(status["routed"])
    for worker in status["workers"]:
        answers = "yes" if worker["url"] in routed else "no"
        cells = (worker["name"], worker["phase"], worker["version"] or "–", str(worker["running"]), answers)
        table.add_row(*cells, worker["url"] or "–")
    console.print(table)
    rollout = status["rollout"]
    console.print(f"router     {status['router'] or 'starting'}")
    console.print(f"drafter    {rollout['promoted']}, of {', '.join(status['versions'])}")
    if rollout["stage"] != "steady":
        console.print(f"roll-out   {rollout['candidate']} is {rollout['stage']}: {status['verdict']}")
    captured = status["captured"]
    console.print(f"captured   {captured['records']:,} records, {captured['records_dropped']:,} dropped")
    if "accounting" in status:
        parts = ", ".join(f"{name} {count:,}" for name, count in status["accounting"].items())
        console.print(f"records    {parts or 'the trainer starts'}")
        console.print(f"training   {status['train_steps']:,} steps")
