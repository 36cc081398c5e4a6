"""The GPU script's own code on the CPU: the stages that need no SGLang, in a process as `run.sh` starts it.

serve, swap and capture have a dry mode too (three minutes, two servers); it is run by hand, as the serving tests cover
the same calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("run.sh")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, check=False, timeout=500
    )


def test_attention_and_train_run_dry(tmp_path: Path) -> None:
    done = run("--dry", "--stage", "attention", "--stage", "train", "--out", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    rows = found["rows"]
    assert found["dry"]
    assert {row["stage"] for row in rows} == {"attention", "train"}
    compared = [row for row in rows if "max error" in row["note"]]
    assert {row["what"] for row in compared} == {"torch cascade", "sdpa", "flex"}
    assert all(row["note"].endswith(" ok") for row in compared)
    steps = {row["case"].split()[0]: row for row in rows if row["what"] == "step"}
    assert set(steps) == {"eagle3", "dflash"}
    assert all(row["value"] > 0 and row["share"] > 0 for row in steps.values())
    (flashinfer,) = [row for row in rows if row["what"] == "FlashInfer"]
    assert "left out of this run" in flashinfer["note"]
    assert "Llama-3.1-8B" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no GPU")
def test_without_a_gpu_and_without_dry_it_says_so() -> None:
    done = run("--stage", "attention")
    assert done.returncode == 2
    assert done.stderr.strip() == "error: no GPU here: use --dry to run every stage on the CPU with tiny shapes"
