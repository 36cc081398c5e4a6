"""What every process that trains holds: the drafter in training, the one in service, and their target."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from draftloop.core.config import Config
from draftloop.core.manifest import Manifest
from draftloop.drafters.checkpoint import load_any
from draftloop.drafters.device import use_cuda
from draftloop.drafters.dflash_loss import DflashSettings
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.eagle3_loss import TttSettings
from draftloop.drafters.lessons import LessonSettings
from draftloop.drafters.online import OnlineSettings, OnlineTrainer
from draftloop.drafters.target import FrozenTarget, load_target_weights


class Learner:
    """target, serving: checkpoint folders.  mesh: of the processes that share the training; None: this one alone."""

    def __init__(self, target: Path, serving: Path, config: Config, mesh: DeviceMesh | None) -> None:
        self.device = training_device(config)
        if self.device == "cpu":
            torch.set_num_threads(config.trainer.threads)
        weights = load_target_weights(target)
        self.serving, self.manifest = self._load(serving)
        frozen = FrozenTarget.of(weights.embedding, weights.lm_head, self.serving.draft_ids().cpu())
        self.target = frozen.to(self.device)
        drafter, _ = self._load(serving)
        self.online = OnlineTrainer(drafter, self.target, online_settings(config), config.seed, mesh)
        self.online.guard(self.serving)

    def promoted(self, folder: Path) -> None:
        """The checkpoint in `folder` serves now."""
        self.serving, self.manifest = self._load(folder)
        self.online.guard(self.serving)

    def _load(self, folder: Path) -> tuple[Drafter, Manifest]:
        drafter, manifest = load_any(folder)
        return drafter.to(self.device), manifest


def training_device(config: Config) -> str:
    return "cuda" if use_cuda(config.trainer.device) else "cpu"


def online_settings(config: Config) -> OnlineSettings:
    trainer = config.trainer
    return OnlineSettings(
        ttt=TttSettings(steps=trainer.ttt_steps, decay=trainer.ttt_decay, divergence=trainer.divergence),
        # The paper's 4, 5 and 7 for blocks of 8, 10 and 16.
        block=DflashSettings(gamma=min(config.drafter.block_size / 2, 7.0)),
        lessons=LessonSettings(refused_weight=trainer.refused_weight, guard_weight=trainer.guard_weight),
        learning_rate=trainer.learning_rate,
        warmup_steps=trainer.warmup_steps,
        cosine_steps=trainer.cosine_steps,
        weight_decay=trainer.weight_decay,
        clip_norm=trainer.clip_norm,
        ema_decay=trainer.ema_decay,
    )
