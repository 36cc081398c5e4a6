"""The figures and the tables of what `four_systems.py` found.

python tests/bench/four_figures.py WORK/results.json FOLDER      FOLDER/*.png; the tables in Markdown on stdout
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

# Stage of the whole data -> prefix of the stages on a part of it.
PARTS = {"EAGLE-3": "eagle3", "EAGLE-3, without training-time test": "no-ttt", "EAGLE-1": "eagle1"}


def draw_figures(found: dict[str, Any], out: Path) -> None:
    """Each figure whose stages are there."""
    out.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for name in ("EAGLE-1", "EAGLE-3", "EAGLE-3, without training-time test", "DFlash"):
        if name in found:
            values = [v for v in found[name]["chain"]["positions"] if v is not None]
            axes.plot(range(1, len(values) + 1), values, marker="o", label=name)
    axes.set(xlabel="position of the draft in a chain", ylabel="accepted, given the earlier ones", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8)
    figure.savefig(out / "positions.png", dpi=100)
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for name, prefix in PARTS.items():
        parts = [found[key] for part in (16, 4) if (key := f"{prefix} on 1/{part}") in found]
        points = [(part["tokens"], part["chain"]["accept_length"]) for part in parts]
        if points and name in found:
            points.append((found["plain"]["train_tokens"], found[name]["chain"]["accept_length"]))
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xlabel="tokens of the training answers", ylabel="expected accepted length of a chain", xscale="log")
    axes.legend(fontsize=8)
    figure.savefig(out / "growth.png", dpi=100)
    if "EAGLE-3" in found:
        points = found["EAGLE-3"]["calibration"]
        figure, axes = plt.subplots(figsize=(3.5, 3.5), layout="constrained")
        axes.plot([0, 1], [0, 1], color="0.7")
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o")
        axes.set(xlabel="draft confidence", ylabel="accepted")
        figure.savefig(out / "calibration.png", dpi=100)


def tables(found: dict[str, Any]) -> str:
    lines = ["| system | accepted length, greedy | T=1 | by position, greedy | tokens/s |", "|---|---|---|---|---|"]
    lines.append(f"| no drafter | 1 | 1 | | {found['plain']['tokens_per_s']} |")
    for stage in found.values():
        for row, how in stage.get("rows", {}).items():
            greedy, sampled = how["greedy"], how.get("sampled", {}).get("accept_length", "")
            lines.append(
                f"| {row} | {greedy['accept_length']} | {sampled} | {spell(greedy['positions'])} "
                f"| {greedy['tokens_per_s']} |"
            )
    lines += ["", "| drafter, a chain of five | expected accepted length | by position |", "|---|---|---|"]
    for name, result in found.items():
        for label, chain in chains(name, result):
            lines.append(f"| {label} | {chain['accept_length']} | {spell(chain['positions'])} |")
    return "\n".join(lines)


def chains(name: str, result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every chain in a stage's result, with a label that says where."""
    if "accept_length" in result:
        return [(name, result)]
    inner = [(key, value) for key, value in result.items() if isinstance(value, dict) and key != "rows"]
    return [
        found
        for key, value in inner
        for found in chains(name if key == "chain" else f"{name}: {key}", value)
    ]  # fmt: skip


def spell(positions: list[float | None]) -> str:
    return " ".join("–" if p is None else f"{p:.2f}" for p in positions)


if __name__ == "__main__":
    results = json.loads(Path(sys.argv[1]).read_text())
    draw_figures(results, Path(sys.argv[2]))
    print(tables(results))
