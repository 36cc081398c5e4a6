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
import random_checkpoint
import torch
from random_checkpoint import write_random_llama
from transformers import LlamaForCausalLM

from draftloop.drafters.known_models import KNOWN_MODELS
from draftloop.drafters.target import load_target_weights

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300}  # fmt: skip
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


@pytest.mark.parametrize("shard_bytes", [1 << 30, 40_000])
def test_a_random_checkpoint_is_a_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    """As the serving stages write one of 8B, in one file or in shards: transformers and the trainer can read it."""
    monkeypatch.setattr(random_checkpoint, "SHARD_BYTES", shard_bytes)
    shape = {**KNOWN_MODELS["Llama-3.1-8B-Instruct"], **TINY}
    write_random_llama(tmp_path, shape, torch.device("cpu"))
    assert (len(list(tmp_path.glob("*.safetensors"))) == 1) == (shard_bytes > 1 << 20)
    model, loaded = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    weights = load_target_weights(tmp_path)
    assert torch.equal(weights.lm_head, model.lm_head.weight.float())
    assert weights.lm_head.shape == (300, 32)
    assert 0.015 < float(weights.lm_head.std()) < 0.025


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no GPU")
def test_without_a_gpu_and_without_dry_it_says_so() -> None:
    done = run("--stage", "attention")
    assert done.returncode == 2
    assert done.stderr.strip() == "error: no GPU here: use --dry to run every stage on the CPU with tiny shapes"
