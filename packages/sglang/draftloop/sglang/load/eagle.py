"""The controller in SGLang's EAGLE worker: chooses each decoding step's shape, and keeps the books.

    step(batch) ── choose shape from cost, calibration, first-level confidences
       │ plain: SGLang's own zero-step mode; the drafter rests (rest.py)
       └ draft ── grow depth levels of width beams ── prune to the best node budget ── verify ── learn the verdicts

Python runs every step only where no graph is replayed, so this is for eager servers (the CPU platform's).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftloop.drafters.load.gains import TreeGains
from draftloop.drafters.load.shapes import Shape
from draftloop.sglang.hooks import EAGLE_SERVER, EAGLE_WORKER, Hook
from draftloop.sglang.load.follower import Follower
from draftloop.sglang.load.rest import MissedTokens
from draftloop.sglang.load.settings import LoadSettings


@dataclass(slots=True)
class Drawn:
    """The trees drawn in this step. levels: path confidences, [B, parents, children] a level.  chosen: [B, nodes - 1]
    flat index of each verified draft among all that were drawn."""

    levels: list[NDArray[np.floating]]
    chosen: NDArray[np.int64]


class EagleFollower:
    """One lives in each scheduler process; its methods are hooks, `start` the first to be called."""

    _worker: Any

    def __init__(self, settings: LoadSettings) -> None:
        self._shapes = settings.shapes
        self._gains = TreeGains(settings.shapes)
        self._follower = Follower(settings, self._gains, self._gains.reliability)
        self._missed = MissedTokens()
        self._backends: dict[tuple[int, int], Any] = {}
        self._shape = settings.shapes[-1]
        self._drawn: Drawn | None = None

    def hooks(self) -> tuple[Hook, ...]:
        organize = "sglang.srt.speculative.eagle_utils.organize_draft_results"
        return (
            Hook(f"{EAGLE_SERVER}.init_cuda_graphs", ("self",), "AFTER", self.start),
            Hook(f"{EAGLE_SERVER}.forward_batch_generation", ("self", "batch"), "AROUND", self.step),
            Hook(f"{EAGLE_WORKER}.draft", ("self", "batch"), "AROUND", self.draft),
            Hook(organize, ("score_list", "token_list", "parents_list", "num_draft_token"), "AROUND", self.prune),
            Hook(f"{EAGLE_SERVER}._stub_skipped_draft_extend", ("self", "batch", "batch_output"), "BEFORE", self.rest),
        )

    def start(self, _result: None, worker: Any) -> None:
        """All models are loaded: build what each depth and width drafts with."""
        from sglang.srt.speculative.draft_utils import DraftBackendFactory

        self._worker = worker
        draft = worker.draft_worker.draft_runner
        for depth, width in {(shape.depth, shape.width) for shape in self._shapes}:
            self._backends[depth, width] = DraftBackendFactory(draft, width, depth).create_decode_backend()
        self._follower.start(worker.target_worker.model_runner, draft)

    def step(self, original: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not batch.forward_mode.is_decode():
            if batch.forward_mode.is_extend():
                self._missed.forget(batch)
            self._follower.interrupted()
            return original(worker, batch, *args, **kwargs)
        awake = self._shape.drafts
        self._activate(worker, self._follower.choose(batch, batch.spec_info.topk_p.numpy() if awake else None))
        caught_up = self._shape.drafts and self._missed.catch_up(worker, batch)
        self._drawn = None
        result = original(worker, batch, *args, **kwargs)
        if self._drawn is not None:
            self._learn(self._drawn, result.accept_index.numpy(), result.accept_lens.numpy())
        self._follower.ran(self._shape, comparable=not caught_up)
        return result

    def _activate(self, worker: Any, shape: Shape) -> None:
        """As SGLang's `apply_runtime_state` does, but for the launch-time settings: those size the KV slots of a
        request, which must go on holding the largest shape."""
        drafter = worker.draft_worker
        worker.speculative_num_steps = drafter.speculative_num_steps = shape.depth
        worker.speculative_num_draft_tokens = drafter.speculative_num_draft_tokens = shape.nodes
        drafter.draft_attn_backend = self._backends[shape.depth, shape.width]
        self._shape = shape

    def draft(self, original: Any, drafter: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Draft with this step's width; the drafter's state between steps keeps the launch-time one."""
        state, launched = batch.spec_info, drafter.topk
        width = self._shape.width
        state.topk_p, state.topk_index = state.topk_p[:, :width], state.topk_index[:, :width]
        drafter.topk = width
        try:
            return original(drafter, batch, *args, **kwargs)
        finally:
            drafter.topk = launched

    def prune(self, original: Any, score_list: Any, token_list: Any, parents_list: Any, num_draft_token: int) -> Any:
        """Between drafting and building the tree: all drawn nodes' confidences are known, the budget is still free."""
        levels = [scores.numpy() for scores in score_list]
        calibrated = self._gains.calibrated(levels)
        self._gains.see(calibrated, self._shape.width)
        self._activate(self._worker, self._follower.prune(self._shape, calibrated))
        drawn = original(score_list, token_list, parents_list, self._shape.nodes)
        self._drawn = Drawn(levels, drawn[1].numpy())
        return drawn

    def _learn(self, drawn: Drawn, accept_index: NDArray[Any], accept_lens: NDArray[Any]) -> None:
        """accept_index: [B, depth + 1] index of each accepted node among the batch's, root first, holes behind
        accept_lens: [B]."""
        batch, drafts = drawn.chosen.shape
        verdict = np.zeros(batch * (drafts + 1), dtype=np.bool_)
        verdict[accept_index[np.arange(accept_index.shape[1]) < accept_lens[:, None]]] = True
        accepted = verdict.reshape(batch, drafts + 1)[:, 1:]
        confidence = np.take_along_axis(
            np.concatenate([x.reshape(batch, -1) for x in drawn.levels], 1), drawn.chosen, 1
        )
        ends = np.cumsum([level[0].size for level in drawn.levels])
        level = 1 + np.searchsorted(ends, drawn.chosen, side="right")
        for depth in range(1, len(drawn.levels) + 1):
            here = level == depth
            if here.any():
                self._gains.observe(depth, confidence[here], accepted[here])

    def rest(self, worker: Any, batch: Any, batch_output: Any) -> None:
        self._missed.note(batch, batch_output.logits_output.hidden_states)
