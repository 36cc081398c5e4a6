"""The online trainer: any number of batches to one optimiser step, averaged weights for the candidate, exact resume.

Batches of one step may lie in one process or be spread over a mesh of them; either way the gradient is that of one
large batch, because every loss is divided by what ALL of them weigh (see `losses`). Batch i of rank r is number
i * ranks + r of its step, and draws its anchors or noise from (seed, step, number). On a mesh, weights, gradients,
AdamW's moments and the average are sharded (see `sharding`); a saved state is whole, so any number of processes may
go on with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from draftloop.core.errors import CheckpointError
from draftloop.drafters.batch import Batch
from draftloop.drafters.dflash import DflashDrafter
from draftloop.drafters.dflash_loss import DflashObjective, DflashSettings
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.eagle1 import Eagle1Drafter, Eagle1Objective, Eagle1Settings
from draftloop.drafters.eagle3 import Eagle3Drafter
from draftloop.drafters.eagle3_loss import TttObjective, TttSettings
from draftloop.drafters.lessons import LessonSettings
from draftloop.drafters.losses import Objective, Plan, Tally
from draftloop.drafters.spread import Spread
from draftloop.drafters.target import FrozenTarget
from draftloop.drafters.vocab import VocabMove, offsets_from_ids


@dataclass(frozen=True)
class OnlineSettings:
    """AdamW with a linear warm-up, then a constant rate, or a cosine to 0 at step `cosine_steps`.

    ttt, feature, block: the objective of EAGLE-3, of EAGLE-1, of DFlash; a drafter reads its own.
    lessons: extra terms from serving, for EAGLE-3 and DFlash.
    ema_decay: of the averaged weights, reached gradually.
    """

    ttt: TttSettings = field(default_factory=TttSettings)
    feature: Eagle1Settings = field(default_factory=Eagle1Settings)
    block: DflashSettings = field(default_factory=DflashSettings)
    lessons: LessonSettings = field(default_factory=LessonSettings)
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    cosine_steps: int | None = None
    weight_decay: float = 0.0
    clip_norm: float = 0.5
    ema_decay: float = 0.98


@dataclass(frozen=True)
class StepReport:
    """What one optimiser step saw, over all its batches and processes. step_loss, step_accuracy: one number a
    group of the loss (EAGLE-3: a step; DFlash: a slot).  skipped: the batches taught nothing, or a gradient was
    not finite; no weight was touched."""

    step: int
    loss: float
    step_loss: tuple[float, ...]
    step_accuracy: tuple[float, ...]
    grad_norm: float
    learning_rate: float
    tokens: int
    positions: int
    skipped: bool


def objective_of(
    drafter: Drafter, target: FrozenTarget, settings: OnlineSettings, earlier: Drafter | None = None
) -> Objective:
    """The loss a drafter is trained by. earlier: of the same kind, what must not be forgotten on replayed rows."""
    match drafter:
        case Eagle3Drafter():
            return TttObjective(drafter, target, settings.ttt, settings.lessons, earlier)
        case Eagle1Drafter():
            return Eagle1Objective(drafter, target, settings.feature)
        case DflashDrafter():
            return DflashObjective(drafter, target, settings.block, settings.lessons, earlier)
    raise TypeError(f"no objective trains a {type(drafter).__name__}")


def _spread(drafter: Drafter, mesh: DeviceMesh | None) -> Spread:
    if mesh is None:
        return Spread()
    from draftloop.drafters.sharding import Sharded

    return Sharded(drafter, mesh)


class OnlineTrainer:
    """Trains a drafter of any kind in place. `generator` is for the caller's draws (crops, record order), so that
    a resumed run draws what the unbroken one would have drawn. mesh: one dimension of processes that share each step
    and shard the drafter; each of them makes the same calls, but for its own batches."""

    def __init__(
        self,
        drafter: Drafter,
        target: FrozenTarget,
        settings: OnlineSettings,
        seed: int,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.drafter = drafter
        self.target = target
        self.settings = settings
        self.generator = torch.Generator().manual_seed(seed)
        self.steps_done = 0
        self.tokens_seen = 0
        self._seed = seed
        self._group = None if mesh is None else mesh.get_group()
        self._spread = _spread(drafter, mesh)
        self._objective = objective_of(drafter, target, settings)
        self._parameters: dict[str, Tensor] = dict(drafter.named_parameters())
        self._average = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._optimizer = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def guard(self, earlier: Drafter) -> None:
        """From now on keep to what this drafter says on replayed rows, if `lessons.guard_weight` says so."""
        if self.settings.lessons.guard_weight > 0.0:
            self._objective = objective_of(self.drafter, self.target, self.settings, earlier)

    def step(self, *batches: Batch) -> StepReport:
        """Forward and backward of each batch, and one update. A process gives at least one."""
        self.drafter.train()
        plans = [self._objective.plan(batch, self._draws(place)) for place, batch in enumerate(batches)]
        mass = self._over_all(torch.stack([plan.mass for plan in plans]).sum(0)).clamp(min=1.0)
        total = self._backward(batches, plans, mass)
        tokens = torch.tensor([float(sum(batch.num_tokens for batch in batches))], device=mass.device)
        seen = self._over_all(torch.cat((total.loss[None], tokens, total.sums, total.hits, total.counts)))
        rate = self._learning_rate()
        norm = self._clip()
        groups = len(mass)
        loss, token_count, *numbers = seen.tolist()
        sums, hits, counts = (numbers[i * groups : (i + 1) * groups] for i in range(3))
        # A record with a damaged state must not reach the weights.
        skipped = sum(counts) == 0 or not math.isfinite(norm)
        if not skipped:
            self._update(rate, int(token_count))
        self._optimizer.zero_grad()
        return StepReport(
            step=self.steps_done,
            loss=loss,
            step_loss=tuple(s / max(n, 1.0) for s, n in zip(sums, counts, strict=True)),
            step_accuracy=tuple(h / max(n, 1.0) for h, n in zip(hits, counts, strict=True)),
            grad_norm=norm,
            learning_rate=rate,
            tokens=int(token_count),
            positions=int(sum(counts)),
            skipped=skipped,
        )

    def _backward(self, batches: Sequence[Batch], plans: Sequence[Plan], mass: Tensor) -> Tally:
        """Leave the gradient of all processes' batches in the parameters; what this process's own taught."""
        parts: list[Tally] = []

        def backward() -> None:
            for batch, plan in zip(batches, plans, strict=True):
                parts.append(self._objective.backward(batch, plan, mass))

        self._spread.accumulate(backward)
        return reduce(Tally.__add__, parts)

    def _clip(self) -> float:
        """Shorten the gradient to `clip_norm`; returns how long it was, over all processes."""
        grads = [self._spread.own_rows(p.grad) for p in self._parameters.values() if p.grad is not None]
        norm = self._over_all(torch.nn.utils.get_total_norm(grads).square()).sqrt()
        shorter = (self.settings.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(shorter)
        return float(norm)

    def candidate_state_dict(self) -> dict[str, Tensor]:
        """A copy of the averaged weights, whole, under the names of the drafter's state dict."""
        state = self.drafter.state_dict() | self._average
        return {name: self._spread.whole(tensor).detach().clone() for name, tensor in state.items()}

    @torch.no_grad()
    def change_vocabulary(self, move: VocabMove) -> None:
        """Go on with another draft vocabulary. A kept token keeps its head row, the row's average and its optimiser
        state; a new one starts from the target's row, as on day 0. EAGLE-3 only: raises TypeError for others."""
        if not isinstance(self.drafter, Eagle3Drafter):
            raise TypeError(f"a {type(self.drafter).__name__} has no draft vocabulary of its own")
        head, spread = self.drafter.lm_head.weight, self._spread
        fresh = self.target.lm_head[move.ids].to(head.dtype)
        for rows in (head, self._average["lm_head.weight"]):
            rows.copy_(spread.laid_like(move.carry(spread.whole(rows), fresh), rows))
        for moment in self._optimizer.state[head].values():
            if moment.shape == head.shape:
                rows = spread.whole(moment)
                moment.copy_(spread.laid_like(move.carry(rows, torch.zeros_like(rows)), moment))
        self.drafter.d2t.copy_(offsets_from_ids(move.ids, self.drafter.config.vocab_size))
        self._speak(move.ids)

    def _speak(self, draft_ids: Tensor) -> None:
        """Be taught by these rows [Vd] of the target's head."""
        self.target = FrozenTarget.of(self.target.embedding, self.target.lm_head, draft_ids)
        self._objective = objective_of(self.drafter, self.target, self.settings)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that a bit-exact resume needs, whole and on the CPU, by these names:

        drafter.*, average.*                  weights and buffers; averaged weights
        step.*, exp_avg.*, exp_avg_sq.*       AdamW's state of each parameter
        generator, progress                   the caller's draws; [steps_done, tokens_seen] int64
        """
        state = {f"drafter.{name}": tensor for name, tensor in self.drafter.state_dict().items()}
        state |= {f"average.{name}": tensor for name, tensor in self._average.items()}
        for name, parameter in self._parameters.items():
            state |= {f"{key}.{name}": tensor for key, tensor in self._optimizer.state[parameter].items()}
        state["generator"] = self.generator.get_state()
        state["progress"] = torch.tensor([self.steps_done, self.tokens_seen])
        return {name: self._spread.whole(tensor.detach()).cpu() for name, tensor in state.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict()` of a trainer with the same settings, whatever its number of processes. Raises
        CheckpointError, with nothing changed, when it is of a drafter of another shape."""
        own = {f"drafter.{name}": tensor for name, tensor in self.drafter.state_dict().items()}
        own |= {f"average.{name}": tensor for name, tensor in self._average.items()}
        for name, tensor in own.items():
            if name not in state or state[name].shape != tensor.shape:
                raise CheckpointError(f"the training state has no {name} of shape {list(tensor.shape)}")
        before = self.drafter.draft_ids()
        for name, tensor in own.items():
            tensor.copy_(self._spread.laid_like(state[name].to(tensor.device), tensor))
        if not torch.equal(self.drafter.draft_ids(), before):
            self._speak(self.drafter.draft_ids())
        for name, parameter in self._parameters.items():
            self._optimizer.state[parameter] = {
                key: self._of_optimizer(state[f"{key}.{name}"], parameter)
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"{key}.{name}" in state
            }
        self.generator.set_state(state["generator"])
        self.steps_done, self.tokens_seen = state["progress"].tolist()

    def _of_optimizer(self, saved: Tensor, parameter: Tensor) -> Tensor:
        """A copy; what is shaped like the parameter lies like it."""
        saved = saved.to(parameter.device, copy=True)
        return self._spread.laid_like(saved, parameter) if saved.shape == parameter.shape else saved

    def _update(self, rate: float, tokens: int) -> None:
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()
        self.steps_done += 1
        self.tokens_seen += tokens
        self._update_average()

    def _draws(self, place: int) -> torch.Generator:
        """The randomness of one batch of this step, whichever process holds it."""
        ranks, rank = (1, 0) if self._group is None else (self._group.size(), self._group.rank())
        number = place * ranks + rank
        return torch.Generator().manual_seed(((self._seed << 20) + self.steps_done << 12) + number)

    def _over_all(self, numbers: Tensor) -> Tensor:
        """Sum in place over the processes."""
        if self._group is not None:
            dist.all_reduce(numbers, group=self._group)
        return numbers

    def _learning_rate(self) -> float:
        now, end = self.steps_done, self.settings.cosine_steps
        warm = min(1.0, (now + 1) / max(self.settings.warmup_steps, 1))
        cosine = 1.0 if end is None else 0.5 * (1.0 + math.cos(math.pi * min(now / end, 1.0)))
        return self.settings.learning_rate * warm * cosine

    @torch.no_grad()
    def _update_average(self) -> None:
        # Early averages would hold mostly the untrained start; the usual ramp forgets it.
        decay = min(self.settings.ema_decay, (1 + self.steps_done) / (10 + self.steps_done))
        torch._foreach_lerp_(list(self._average.values()), list(self._parameters.values()), 1.0 - decay)
