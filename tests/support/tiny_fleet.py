"""The config of a fleet of tiny servers on a CPU, and the drafters its tests roll out."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from device import DEVICE
from safetensors.torch import load_file, save_file
from tiny_llama import TinyTarget, make_tiny_target, random_prompts

from draftloop.core.config import Config
from draftloop.drafters.checkpoint import WEIGHTS_FILE, load_any, save_drafter
from draftloop.generator.prompts import chat_tokens, load_prompts
from draftloop.trainer.day0 import make_untrained
from draftloop.trainer.trainer import Trainer

TRAINED_STEPS = 100


def fleet_config(target: TinyTarget, folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Two workers of one thread each; everything else small. sections: over the defaults here."""
    prompts = folder / "prompts.jsonl"
    rng = random.Random(4)
    words = ["bado", "kiru", "molan", "fe", "so"]
    rows = [{"domain": "chat", "prompt": " ".join(rng.choices(words, k=6))} for _ in range(20)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    config: dict[str, Any] = {
        "target": {"path": str(target.folder), "context_length": 1024},
        "drafter": {"draft_vocab_size": 256},
        "server": {
            "device": DEVICE,
            "threads": 1,
            "max_running_requests": 8,
            "max_total_tokens": 8192,
            "chunked_prefill_size": 64,
            "start_timeout_s": 420,
        },
        "capture": {"ring_mib": 8, "holdout_fraction": 0.3},
        "trainer": {"device": DEVICE, "batch_tokens": 256, "learning_rate": 3e-3},
        "gate": {"every_seconds": 8, "min_records": 2, "max_eval_tokens": 512},
        "traffic": {"prompts": str(prompts)},
        "fleet": {"workers": 2, "backoff_s": 0.5, "health_timeout_s": 120},
        "router": {"port": None, "metrics_port": None, "balance_abs_threshold": 0},
        # Nothing here may hang on the machine's speed: streams are compared, but only by a wide margin.
        "rollout": {"min_steps": 100, "max_accept_drop": 0.05, "max_speed_drop": 0.95, "max_stall_ms": 600000},
    }
    for name, section in sections.items():
        config[name] = config.get(name, {}) | section
    return config


@dataclass(frozen=True)
class Drafters:
    """Checkpoint folders, each poisoned in its own way."""

    random: Path
    nan: Path
    layers: Path
    template: Path


def make_drafters(target: TinyTarget, config: Config, folder: Path) -> Drafters:
    """All have the vocabulary map of a fleet of the same config."""

    def untrained(version: str, seed: int, of: TinyTarget = target, layers: tuple[int, ...] | None = None) -> Path:
        tokenize = chat_tokens(target.folder)  # one vocabulary map for all
        streams = (tokenize(prompt.messages) for prompt in load_prompts(config.traffic.prompts))
        shape = config.drafter.model_copy(update={"layer_ids": layers})
        make_untrained(of.folder, shape, streams, folder / version, version, seed)
        return folder / version

    day0 = untrained("born", 0)
    noise, nan = _noise(day0, folder / "random"), _with_nan(day0, folder / "nan")
    other = make_tiny_target(folder / "other", seed=0)
    (other.folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    return Drafters(noise, nan, untrained("layers", 3, layers=(0, 2, 3)), untrained("template", 4, of=other))


def make_trained(target: TinyTarget, config: Config, folder: Path) -> Path:
    """A drafter that is accepted about 1.5 tokens a step, with the vocabulary map of a fleet of the same config."""
    tokenize = chat_tokens(target.folder)
    streams = (tokenize(prompt.messages) for prompt in load_prompts(config.traffic.prompts))
    day0 = folder.with_name(f"{folder.name}-day0")
    make_untrained(target.folder, config.drafter, streams, day0, day0.name, seed=0)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        trainer = Trainer(target.folder, day0, config)
        prompts = random_prompts(16, [8, 12, 20], seed=1)
        trainer.add_records([target.record(prompt, 40, "chat", i) for i, prompt in enumerate(prompts)])
        steps = 0
        while steps < TRAINED_STEPS:
            steps += len(trainer.train(1e-6))
        return trainer.save_candidate(folder, folder.name, {})
    finally:
        torch.set_num_threads(threads)


def _noise(day0: Path, folder: Path) -> Path:
    """Random weights under a manifest that matches: only what the drafter does can give it away."""
    drafter, manifest = load_any(day0)
    state = {
        name: torch.randn_like(tensor) if tensor.is_floating_point() else tensor
        for name, tensor in drafter.state_dict().items()
    }
    save_drafter(folder, drafter.shape, state, version=folder.name, parent=None, target=manifest.target)
    return folder


def _with_nan(day0: Path, folder: Path) -> Path:
    shutil.copytree(day0, folder)
    state = load_file(folder / WEIGHTS_FILE)
    save_file(state | {"fc.weight": torch.full_like(state["fc.weight"], torch.nan)}, folder / WEIGHTS_FILE)
    return folder
