"""`draftloop simulate` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftloop.cli.main import app
from draftloop.drafters.load.cost_model import CostModel, RowCost, StartUp
from draftloop.drafters.load.served import ServedCosts
from draftloop.drafters.load.shapes import Shape

QUICK = ["--set", "simulate.seconds=60", "--set", "simulate.gate_seconds=5", "--set", "simulate.half_tokens=1e5"]


def cells(text: str) -> dict[str, list[str]]:
    """Rows of the first table by their first cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows if row[0].isdigit()}


def test_the_table_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    command = ["simulate", "--workers", "2", "--workers", "6", *QUICK, "--markdown"]
    first = CliRunner().invoke(app, [*command, str(tmp_path / "a.md")])
    assert first.exit_code == 0, first.output
    CliRunner().invoke(app, [*command, str(tmp_path / "b.md")])
    text = (tmp_path / "a.md").read_text()
    assert text == (tmp_path / "b.md").read_text() == first.output
    rows = cells(text)
    assert list(rows) == ["2", "6"]
    tokens = {workers: float(row[0].replace(",", "")) for workers, row in rows.items()}
    assert 2.5 < tokens["6"] / tokens["2"] < 3.5
    # Of seven devices one trains; two of three serve.
    assert float(rows["6"][2].rstrip("x")) > float(rows["2"][2].rstrip("x"))
    assert "| `simulate.half_tokens` | 100000 |" in text


def test_a_size_that_is_not_modelled() -> None:
    done = CliRunner().invoke(app, ["simulate", "--workers", "0"])
    assert done.exit_code == 2
    assert "1 to 1000 workers" in done.output


def test_measured_costs_stand_in_for_the_estimates(tmp_path: Path) -> None:
    """A server whose steps all take 0.1 s: 16 clients, accepted length 2, nothing to learn."""
    costs = CostModel(StartUp(RowCost.line(0.1, 0.0), RowCost.line(0.0, 0.0), 0.0, 0.0, 0.0))
    report = tmp_path / "speculation.json"
    report.write_text(json.dumps({"served": ServedCosts(Shape(1, 2, 3), False, {4: 1.0}, 0.0, costs).dump()}))
    command = ["simulate", "--workers", "1", "--set", f"simulate.costs={report}", "--set", "simulate.trainers=0"]
    done = CliRunner().invoke(app, [*command, "--set", "simulate.seconds=200"])
    assert done.exit_code == 0, done.output
    assert float(cells(done.output)["1"][0].replace(",", "")) == pytest.approx(16 * 2 / 0.1, rel=0.01)
    assert "| 1x2/3 |" in done.output
    assert "simulate.base_ms" not in done.output
    for bad, message in ((tmp_path / "no", "cannot read"), (Path(__file__), "is not a server's report")):
        done = CliRunner().invoke(app, ["simulate", "--set", f"simulate.costs={bad}"])
        assert (done.exit_code, message in done.output, done.output.count("\n")) == (2, True, 1)
