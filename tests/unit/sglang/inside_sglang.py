"""Run as a program with a server's environment (`test_inside_sglang.py`): what needs SGLang imported, as JSON.

Importing SGLang takes many seconds and fixes its platform for the process, so all of it happens once, here.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sglang.srt.arg_groups import choices
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from draftloop.attention.paging import node_slots
from draftloop.capture.ring import RingOwner
from draftloop.core.errors import HookError
from draftloop.drafters.load.shapes import PLAIN, Shape
from draftloop.sglang.cpu.linear import MOST_PACKED_ROWS, pack, packed_linear
from draftloop.sglang.cpu.ops import rms_norm, rotary, silu_and_mul
from draftloop.sglang.cpu.register import cpu_hooks
from draftloop.sglang.gpu import attention as gpu_attention
from draftloop.sglang.gpu import register as gpu_register
from draftloop.sglang.hooks import Hook, check, confirm_applied, front_hooks, problem_with, tap_hooks
from draftloop.sglang.load import load_hooks
from draftloop.sglang.load.settings import LoadSettings
from draftloop.sglang.tap import Tap, TapSettings


def refusal(hooks: Sequence[Hook], judge: Any) -> str | None:
    try:
        judge(hooks)
    except HookError as err:
        return str(err)
    return None


def hook_checks() -> dict[str, Any]:
    with_ring = RingOwner.create("draftloop-unit-hooks", 1 << 20)
    try:
        tap = Tap(TapSettings(ring=with_ring.name))
        # What both algorithms share is listed once.
        hooks = tuple({h.target: h for name in ("EAGLE3", "DFLASH") for h in tap_hooks(tap, name)}.values())
        hooks += front_hooks()
    finally:
        with_ring.close()
    shapes = (PLAIN, Shape(1, 1, 2))
    following = [
        hook
        for algorithm in ("EAGLE3", "DFLASH")
        for follow in (True, False)
        for hook in load_hooks(LoadSettings(folder=Path(), algorithm=algorithm, shapes=shapes, follow=follow))
    ]
    first = hooks[0]
    renamed = replace(first, parameters=("self", "server_args", "device"))
    release = next(hook for hook in hooks if hook.target.endswith("release_kv_cache"))
    more = replace(release, parameters=(*release.parameters, "is_insert", "no_such_parameter"))
    gone = replace(first, target=f"{first.target}_gone")
    no_module = replace(first, target="sglang.srt.speculative.no_such_module.Worker.draft")
    found: dict[str, Any] = {
        "problems": {hook.target: problem_with(hook) for hook in (*hooks, *cpu_hooks(), *following)},
        "renamed": problem_with(renamed),
        "more": problem_with(more),
        "gone": problem_with(gone),
        "no_module": problem_with(no_module),
        "check_good": refusal(hooks, check),
        "check_bad": refusal((*hooks, renamed), check),
        "unapplied": {hook.target: refusal([hook], confirm_applied) for hook in hooks},
    }
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
    HookRegistry.apply_hooks()
    found["applied"] = refusal(hooks, confirm_applied)
    return found


def op_checks() -> dict[str, float]:
    """Largest difference between our lean op and SGLang's native one, on the shapes a server meets."""
    torch.manual_seed(0)
    worst: dict[str, float] = {}

    def compare(name: str, ours: Any, native: Any) -> None:
        pairs = zip(ours, native, strict=True) if isinstance(ours, tuple) else [(ours, native)]
        worst[name] = max(float((a - b).abs().max()) for a, b in pairs)

    norm = RMSNorm(48, eps=1e-5)
    norm.weight.data = torch.rand(48) + 0.5
    x, residual = torch.randn(7, 48), torch.randn(7, 48)
    compare("rms_norm", rms_norm(norm, x.clone()), norm.forward_native(x.clone()))
    ours = rms_norm(norm, x.clone(), residual.clone())
    compare("rms_norm_residual", ours, norm.forward_native(x.clone(), residual.clone()))
    half = rms_norm(norm, x.bfloat16(), residual.bfloat16())
    compare("rms_norm_bf16", half, norm.forward_native(x.bfloat16(), residual.bfloat16()))
    act = SiluAndMul()
    compare("silu_and_mul", silu_and_mul(act, x.clone()), act.forward_native(x.clone()))
    for name, rotary_dim, neox in (("rotary", 16, True), ("rotary_partial", 8, True), ("rotary_gptj", 16, False)):
        rope = RotaryEmbedding(16, rotary_dim, 128, 10000, neox, torch.float32)
        positions = torch.tensor([0, 3, 3, 90, 127])
        query, key = torch.randn(5, 4 * 16), torch.randn(5, 2 * 16)
        ours = rotary(rope, positions, query.clone(), key.clone())
        compare(name, ours, rope.forward_native(positions, query.clone(), key.clone()))
    weight, bias = torch.randn(24, 48), torch.randn(24)
    packed = pack(weight)
    for rows in (1, 8, MOST_PACKED_ROWS, MOST_PACKED_ROWS + 1):
        many = torch.randn(rows, 48)
        compare(f"packed_linear_{rows}", packed_linear(many, weight, packed, bias), many @ weight.T + bias)
    return worst


def gpu_checks() -> dict[str, Any]:
    """What of the GPU backend needs no GPU: its place in SGLang, and the batch it makes of a verification."""
    gpu_register.register_backend()
    overridden = ("init_forward_metadata", "init_forward_metadata_out_graph", "forward_extend")
    nodes, prefixes = 3, [4, 0, 2, 1]
    table = torch.randperm(60, generator=torch.Generator().manual_seed(0)).view(6, 10).int()
    # Two siblings, a chain, a lone child and its sibling; the fourth request only pads a captured batch.
    trees = [[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]], [[1, 0, 0], [1, 1, 0], [1, 0, 1]]]
    flat = [bit for prefix, tree in zip(prefixes, trees, strict=False) for row in tree for bit in [1] * prefix + row]
    empty = torch.empty(0, dtype=torch.int64)
    spec = EagleVerifyInput(
        draft_token=empty, custom_mask=torch.tensor(flat).bool(), positions=empty, retrieve_index=empty,
        retrieve_next_token=empty, retrieve_next_sibling=empty, retrieve_cum_len=empty, spec_steps=2, topk=2,
        draft_token_num=nodes, capture_hidden_mode=CaptureHiddenMode.FULL, seq_lens_sum=7, seq_lens_cpu=empty,
    )  # fmt: skip
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY, batch_size=4, input_ids=empty,
        req_pool_indices=torch.tensor([5, 0, 3, 1]), seq_lens=torch.tensor(prefixes), out_cache_loc=empty,
        seq_lens_sum=7, spec_info=spec,
    )  # fmt: skip
    tree = gpu_attention.tree_batch(batch, table)
    decode = replace(batch, forward_mode=ForwardMode.DECODE)
    return {
        "registered": gpu_register.BACKEND_NAME in choices.ATTENTION_BACKEND_CHOICES,
        "created_by": gpu_register.BACKEND_NAME in ATTENTION_BACKENDS,
        "parameters": {
            name: [list(inspect.signature(getattr(owner, name)).parameters) for owner in (base, ours)]
            for name in overridden
            for base, ours in [(FlashInferAttnBackend, gpu_attention.CascadeVerifyBackend)]
        },
        "verifies": [gpu_attention.verifies_tree(batch), gpu_attention.verifies_tree(decode)],
        "mask": [tree.tree_mask.int().tolist(), [*trees, [[1] * nodes] * nodes]],
        "slots": [
            node_slots(tree).tolist(),
            [
                [int(table[row, prefix + node]) for node in range(nodes)]
                for row, prefix in zip([5, 0, 3, 1], prefixes, strict=True)
            ],
        ],
        "lengths": tree.kv_lens.tolist(),
    }


if __name__ == "__main__":
    json.dump({"hooks": hook_checks(), "ops": op_checks(), "gpu": gpu_checks()}, sys.stdout)
