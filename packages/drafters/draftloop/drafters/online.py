"""The online trainer: one optimiser step a batch, averaged weights for the candidate, exact resume."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftloop.drafters.batch import Batch
from draftloop.drafters.eagle3 import Eagle3Drafter
from draftloop.drafters.eagle3_loss import TttSettings, eagle3_loss
from draftloop.drafters.target import FrozenTarget


@dataclass(frozen=True)
class OnlineSettings:
    """AdamW with a linear warm-up to a constant rate.  ema_decay: of the averaged weights, reached gradually."""

    ttt: TttSettings = field(default_factory=TttSettings)
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    weight_decay: float = 0.0
    clip_norm: float = 0.5
    ema_decay: float = 0.98


@dataclass(frozen=True)
class StepReport:
    """What one optimiser step saw. skipped: the batch taught nothing, or a gradient was not finite;
    no weight was touched."""

    step: int
    loss: float
    step_loss: tuple[float, ...]
    step_accuracy: tuple[float, ...]
    grad_norm: float
    learning_rate: float
    tokens: int
    positions: int
    skipped: bool


class OnlineTrainer:
    """Trains a drafter in place. `generator` is the trainer's only randomness (crops, record order), so that
    a resumed run draws what the unbroken one would have drawn."""

    def __init__(self, drafter: Eagle3Drafter, target: FrozenTarget, settings: OnlineSettings, seed: int) -> None:
        self.drafter = drafter
        self.target = target
        self.settings = settings
        self.generator = torch.Generator().manual_seed(seed)
        self.steps_done = 0
        self.tokens_seen = 0
        self._parameters: list[Tensor] = list(drafter.parameters())
        self._average = [p.detach().clone() for p in self._parameters]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def step(self, batch: Batch) -> StepReport:
        """One forward, backward and update."""
        self.drafter.train()
        loss = eagle3_loss(self.drafter, batch, self.target, self.settings.ttt)
        rate, norm = self._learning_rate(), 0.0
        if loss.positions > 0:
            loss.loss.backward()  # type: ignore[no-untyped-call]
            norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.clip_norm))
        # A record with a damaged state must not reach the weights.
        skipped = loss.positions == 0 or not math.isfinite(norm)
        if not skipped:
            self._optimizer.param_groups[0]["lr"] = rate
            self._optimizer.step()
            self.steps_done += 1
            self.tokens_seen += batch.num_tokens
            self._update_average()
        self._optimizer.zero_grad()
        return StepReport(
            step=self.steps_done,
            loss=float(loss.loss.detach()),
            step_loss=loss.step_loss,
            step_accuracy=loss.step_accuracy,
            grad_norm=norm,
            learning_rate=rate,
            tokens=batch.num_tokens,
            positions=loss.positions,
            skipped=skipped,
        )

    def candidate_state_dict(self) -> dict[str, Tensor]:
        """A copy of the averaged weights, under the names of the drafter's state dict."""
        state = {name: tensor.detach().clone() for name, tensor in self.drafter.state_dict().items()}
        for (name, _), average in zip(self.drafter.named_parameters(), self._average, strict=True):
            state[name].copy_(average)
        return state

    def state_dict(self) -> dict[str, Any]:
        """Everything that a bit-exact resume needs, for `torch.save`."""
        return {
            "drafter": self.drafter.state_dict(),
            "average": self._average,
            "optimizer": self._optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "steps_done": self.steps_done,
            "tokens_seen": self.tokens_seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of a trainer with the same shapes and settings."""
        self.drafter.load_state_dict(state["drafter"])
        for average, saved in zip(self._average, state["average"], strict=True):
            average.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.steps_done = state["steps_done"]
        self.tokens_seen = state["tokens_seen"]

    def _learning_rate(self) -> float:
        warmup = self.settings.warmup_steps
        return self.settings.learning_rate * min(1.0, (self.steps_done + 1) / max(warmup, 1))

    @torch.no_grad()
    def _update_average(self) -> None:
        # Early averages would hold mostly the untrained start; the usual ramp forgets it.
        decay = min(self.settings.ema_decay, (1 + self.steps_done) / (10 + self.steps_done))
        torch._foreach_lerp_(self._average, self._parameters, 1.0 - decay)
