"""Run the chosen stages, print one table, write one JSON file. See run.sh."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from stages.clock import Setting
from stages.result import Row

STAGES = ("attention", "train", "serve", "swap", "capture")
COLUMNS = ("stage", "case", "what", "value", "unit", "of peak", "note")


def attention(setting: Setting) -> list[Row]:
    from stages.attention import measure

    return measure(setting)


def train(setting: Setting) -> list[Row]:
    from stages.train import measure

    return measure(setting)


def serving(setting: Setting, names: Sequence[str]) -> list[Row]:
    from stages.serving import measure

    return measure(setting, names)


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def machine(setting: Setting) -> dict[str, Any]:
    cuda = setting.device.type == "cuda"
    return {
        "card": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads (dry run)",
        "dry": setting.dry,
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in ("torch", "triton", "flashinfer-python", "sglang")},
    }


def guarded(name: str, work: Callable[[], list[Row]]) -> list[Row]:
    """A stage that fails is a row; the others still run."""
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        return [Row(name, "", "failed", None, "", note=f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")]


def show(rows: Sequence[Row]) -> None:
    lines = [COLUMNS, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure on one GPU; see docs/gpu.md.")
    parser.add_argument("--stage", action="append", choices=STAGES, help="may be repeated; default: all")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU: does everything run?")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="where the JSON goes")
    parser.add_argument("--minutes", type=float, default=7.5, help="when to leave out what is left of a stage")
    arguments = parser.parse_args()
    if not arguments.dry and not torch.cuda.is_available():
        print("error: no GPU here: use --dry to run every stage on the CPU with tiny shapes", file=sys.stderr)
        return 2
    names = arguments.stage or list(STAGES)
    begin = time.monotonic()
    device = torch.device("cpu" if arguments.dry else "cuda")
    setting = Setting(device, arguments.dry, len(names) == 1, begin + 60 * arguments.minutes)
    rows: list[Row] = []
    if "attention" in names:
        rows += guarded("attention", lambda: attention(setting))
    if "train" in names:
        rows += guarded("train", lambda: train(setting))
    if served := [name for name in STAGES[2:] if name in names]:
        rows += guarded("+".join(served), lambda: serving(setting, served))
    show(rows)
    found = {**machine(setting), "seconds": round(time.monotonic() - begin, 1), "rows": [row.json() for row in rows]}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    failed = any(row.what == "failed" for row in rows)
    print(f"{found['card']}, {found['seconds']:.0f} s, {arguments.out}{'; A STAGE FAILED' if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
