"""SGLang attention backend `draftloop_torch`: decode, extend, tree verify, draft decoding, by `draftloop.attention`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel

from draftloop.attention.interface import TreeBatch
from draftloop.attention.torch_backend import TorchTreeAttention, causal_extend
from draftloop.sglang.cpu.kernels import build_draft_decode_metadata_cpu
from draftloop.sglang.cpu.platform import BACKEND_NAME

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class TorchAttnBackend(AttentionBackend):
    """One forward's attention. Uniform batches (every request brings N tokens) go through tree attention in one
    call; ragged prefills run request by request."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        config = model_runner.model_config
        tp_size = get_parallel().attn_tp_size
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.max_context_len = config.context_len
        self.device = model_runner.device
        heads, kv_heads = config.num_attention_heads // tp_size, config.get_num_kv_heads(tp_size)
        self.tree = TorchTreeAttention(heads, kv_heads, config.dtype)
        self.block = TorchTreeAttention(heads, kv_heads, config.dtype)
        self._batch: TreeBatch | None = None
        self._block_planned = False
        self._ragged: list[tuple[int, int, torch.Tensor]] | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        mode = forward_batch.forward_mode
        self._ragged = None
        if mode.is_decode_or_idle():
            self._plan_uniform(forward_batch, forward_batch.seq_lens.long(), 1, None)
        elif mode.is_target_verify():
            nodes = forward_batch.spec_info.draft_token_num
            mask = forward_batch.spec_info.custom_mask  # None for DFLASH, whose block is a chain to the target
            tree = None if mask is None or mask.numel() == 0 else mask.view(-1, nodes, nodes)
            self._plan_uniform(forward_batch, forward_batch.seq_lens.long() + nodes, nodes, tree)
        elif mode.is_draft_extend_v2():
            nodes = forward_batch.input_ids.shape[0] // forward_batch.batch_size
            self._plan_uniform(forward_batch, forward_batch.seq_lens.long(), nodes, None)
        else:
            self._plan_ragged(forward_batch)

    def _plan_uniform(
        self, forward_batch: ForwardBatch, kv_lens: torch.Tensor, nodes: int, mask: torch.Tensor | None
    ) -> None:
        if kv_lens.numel() == 0:
            return
        table = self.req_to_token_pool.req_to_token
        slots = table[forward_batch.req_pool_indices.long(), : int(kv_lens.max())].long()
        self._batch = TreeBatch(slots, kv_lens, nodes, mask)
        self._block_planned = False
        self.tree.plan(self._batch)

    def _plan_ragged(self, forward_batch: ForwardBatch) -> None:
        table = self.req_to_token_pool.req_to_token
        self._ragged, first = [], 0
        rows = forward_batch.req_pool_indices.tolist()
        lengths, news = forward_batch.seq_lens.tolist(), forward_batch.extend_seq_lens.tolist()
        for row, length, new in zip(rows, lengths, news, strict=True):
            self._ragged.append((first, first + new, table[row, :length].long()))
            first += new

    def _store(self, layer: RadixAttention, forward_batch: ForwardBatch, k: torch.Tensor, v: torch.Tensor) -> None:
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        if save_kv_cache and k is not None and v is not None:
            self._store(layer, forward_batch, k, v)
        return self._attend(q, layer)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache)

    def _attend(self, q: torch.Tensor, layer: RadixAttention) -> torch.Tensor:
        if layer.logit_cap or layer.sliding_window_size > -1 or layer.is_cross_attention:
            raise NotImplementedError(
                f"attention backend {BACKEND_NAME} serves full causal attention only (layer {layer.layer_id})"
            )
        heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        if self._ragged is None:
            out = self._tree_for(layer).run(heads, keys, values, layer.scaling)
        else:
            out = torch.empty_like(heads)
            for first, last, slots in self._ragged:
                out[first:last] = causal_extend(heads[first:last], keys, values, slots, layer.scaling)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _tree_for(self, layer: RadixAttention) -> TorchTreeAttention:
        """The planned attention; for a layer that is not causal (DFlash's draft block), one where the N tokens all
        see each other."""
        if layer.attn_type != AttentionType.ENCODER_ONLY or self._batch is None:
            return self.tree
        if not self._block_planned:
            nodes = self._batch.num_nodes
            everyone = torch.ones(self._batch.kv_lens.numel(), nodes, nodes, dtype=torch.bool)
            self.block.plan(replace(self._batch, tree_mask=everyone))
            self._block_planned = True
        return self.block

    def support_triton(self) -> bool:
        return False


class TorchMultiStepDraftBackend:
    """The backends of the draft's successive decode steps; step i sees the prefix and i + 1 draft tokens."""

    def __init__(self, model_runner: ModelRunner, topk: int, num_steps: int) -> None:
        self.topk = topk
        self.num_steps = num_steps
        self.attn_backends = [TorchAttnBackend(model_runner) for _ in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        table = self.attn_backends[0].req_to_token_pool.req_to_token
        seq_lens = forward_batch.seq_lens.long()
        longest = int(seq_lens.max()) + self.topk * self.num_steps
        slots = build_draft_decode_metadata_cpu(
            table[:, :longest], forward_batch.req_pool_indices, seq_lens, self.topk, self.num_steps, longest
        ).long()
        prefix = seq_lens.repeat_interleave(self.topk)
        for step, backend in enumerate(self.attn_backends):
            visible = int(seq_lens.max()) + step + 1
            backend.tree.plan(TreeBatch(slots[:, :visible], prefix + step + 1, 1))
