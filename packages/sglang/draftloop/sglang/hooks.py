"""Every place where draftloop touches SGLang's code, checked before a server starts.

SGLang only logs a hook that fails; an unhooked server would look healthy and teach nothing. So each hook names the
parameters it relies on, `check` compares them with the installed SGLang, and `confirm_applied` looks at the result
in the scheduler process. Either failure ends the server with one line.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from draftloop.core.errors import HookError
from draftloop.sglang.labels import label_from_headers
from draftloop.sglang.tap import Tap, VerifiedTrees

TESTED_VERSIONS = ("0.5.23",)
EAGLE_SERVER = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2"
EAGLE_WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
DFLASH_WORKER = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


@dataclass(frozen=True, slots=True)
class Hook:
    """target: dotted path in SGLang; parameters: the leading ones the hook reads; kind: HookType's name."""

    target: str
    parameters: tuple[str, ...]
    kind: str
    function: Callable[..., Any]


def tap_hooks(tap: Tap, algorithm: str) -> tuple[Hook, ...]:
    """The hooks that feed `tap` from a server with this speculative algorithm, 'EAGLE3' or 'DFLASH'."""
    target_processors: set[int] = set()

    def mark_target(
        _result: None, worker: Any, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any
    ) -> None:
        target_processors.add(id(target_worker.model_runner.model.logits_processor))

    def see_last_hidden(processor: Any, input_ids: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> None:
        if id(processor) in target_processors:
            tap.see_last_hidden(hidden_states)

    def finish(req: Any, *args: Any, **kwargs: Any) -> None:
        if req.finished():
            reason = req.finished_reason.to_json()["type"]
            tap.finish(req.rid, reason)

    def abort(scheduler: Any, abort_req: Any, req: Any) -> None:
        tap.finish(req.rid, "abort")

    def idle(scheduler: Any) -> None:
        tap.idle()

    worker = DFLASH_WORKER if algorithm == "DFLASH" else EAGLE_WORKER
    feeding = dflash_hooks(tap) if algorithm == "DFLASH" else eagle_hooks(tap)
    return (
        Hook(
            f"{worker}.__init__", ("self", "server_args", "gpu_id", "nccl_port", "target_worker"), "AFTER", mark_target
        ),
        Hook(
            "sglang.srt.layers.logits_processor.LogitsProcessor.forward",
            ("self", "input_ids", "hidden_states"),
            "BEFORE",
            see_last_hidden,
        ),
        *feeding,
        Hook("sglang.srt.mem_cache.common.release_kv_cache", ("req", "tree_cache"), "BEFORE", finish),
        # A request that was retracted holds no cache: when it is aborted then, only its client is told.
        Hook(f"{SCHEDULER}.send_abort_output", ("self", "abort_req", "req"), "BEFORE", abort),
        Hook(f"{SCHEDULER}.maybe_sleep_on_idle", ("self",), "BEFORE", idle),
    )


def front_hooks() -> tuple[Hook, ...]:
    """The hooks of the HTTP process, which reads the labels' headers."""
    return (Hook(f"{TOKENIZER_MANAGER}.generate_request", ("self", "obj", "request"), "BEFORE", label_from_headers),)


def serving_version() -> str:
    """The weight version of this scheduler process: the serving drafter's."""
    from sglang.srt.runtime_context import get_serving

    version: str = get_serving().weight_version
    return version


def eagle_hooks(tap: Tap) -> tuple[Hook, ...]:
    """EAGLE hands the target's states to its drafter after each prefill and each verification."""

    def prefill(worker: Any, batch: Any, target_hidden_states: Any, *args: Any, **kwargs: Any) -> None:
        if not batch.forward_mode.is_idle():
            tap.prefill(batch, target_hidden_states)

    def verify(worker: Any, batch: Any, batch_result: Any, *args: Any, **kwargs: Any) -> None:
        if batch.forward_mode.is_idle():
            return
        tree = batch.spec_info  # SGLang's EagleVerifyInput
        verified = VerifiedTrees(
            tree.draft_token.view(len(batch.reqs), tree.draft_token_num),
            batch_result.logits_output.hidden_states,
            batch_result.accept_index,
            batch_result.accept_lens,
            tree.retrieve_next_token,
            tree.retrieve_next_sibling,
            batch_result.logits_output.next_token_logits,
        )
        tap.verify(batch, verified, serving_version())

    return (
        Hook(f"{EAGLE_WORKER}._draft_extend_for_prefill", ("self", "batch", "target_hidden_states"), "BEFORE", prefill),
        Hook(f"{EAGLE_WORKER}._draft_extend_for_decode", ("self", "batch", "batch_result"), "BEFORE", verify),
        # A step that skips the drafter (plain decoding under load) verifies a tree of one node.
        Hook(f"{EAGLE_SERVER}._stub_skipped_draft_extend", ("self", "batch", "batch_output"), "BEFORE", verify),
    )


def dflash_hooks(tap: Tap) -> tuple[Hook, ...]:
    """DFlash writes the target's states into its draft's KV cache; the batch they belong to is seen just before."""
    current: list[Any] = []
    verdict: list[Any] = []

    def begin(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        current[:] = [batch]

    def judge(worker: Any, *, candidates: Any, next_token_logits: Any, **kwargs: Any) -> None:
        verdict[:] = [candidates, next_token_logits]

    def append(
        worker: Any, *, target_hidden: Any, cache_loc: Any, positions: Any, commit_lens: Any = None, **kwargs: Any
    ) -> None:
        (batch,) = current
        if commit_lens is None:
            tap.prefill(batch, target_hidden)
        else:
            tokens, logits = verdict
            verdict.clear()
            tap.verify(batch, VerifiedTrees.of_chains(tokens, target_hidden, commit_lens, logits), serving_version())

    return (
        Hook(f"{DFLASH_WORKER}.forward_batch_generation", ("self", "batch"), "BEFORE", begin),
        Hook(f"{DFLASH_WORKER}._accept_block", ("self", "candidates", "next_token_logits"), "BEFORE", judge),
        Hook(
            f"{DFLASH_WORKER}._append_target_hidden_to_draft_kv_by_loc",
            ("self", "target_hidden", "cache_loc", "positions"),
            "BEFORE",
            append,
        ),
    )


def problem_with(hook: Hook) -> str | None:
    """Why `hook` cannot be applied to the installed SGLang, or None."""
    try:
        target = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError) as err:
        return f"does not exist ({err})"
    found = tuple(inspect.signature(target).parameters)[: len(hook.parameters)]
    if found != hook.parameters:
        return f"takes ({', '.join(found)}), expected ({', '.join(hook.parameters)})"
    return None


def check(hooks: Sequence[Hook]) -> None:
    """Raise HookError, naming the first hook whose target is missing or has another signature."""
    for hook in hooks:
        if problem := problem_with(hook):
            raise HookError(
                f"SGLang {version('sglang')}: hook target {hook.target} {problem}; "
                f"tested with {', '.join(TESTED_VERSIONS)}: install one of these"
            )


def confirm_applied(hooks: Sequence[Hook]) -> None:
    """Raise HookError when a hook's target is not wrapped (SGLang logs such failures and goes on)."""
    for hook in hooks:
        if not hasattr(pkgutil.resolve_name(hook.target), "__wrapped__"):
            raise HookError(f"SGLang {version('sglang')}: hook {hook.target} was not applied in its process")
