"""SGLang attention backend `draftloop_flashinfer`: its own FlashInfer backend, verifying EAGLE trees in two parts.

SGLang hands FlashInfer a mask of N bits for every visible column of every request. Here the prefix goes unmasked, and
only the N x N block of that mask is kept (`draftloop.attention.flashinfer_backend`). Decoding, prefill, draft steps and
DFLASH's chains, which need no mask, stay the base class's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_info import SpecInputType

from draftloop.attention.flashinfer_backend import FlashInferCascade, Limits
from draftloop.attention.interface import TreeBatch
from draftloop.attention.trees import tree_block
from draftloop.core.errors import ConfigError
from draftloop.sglang.gpu.register import BACKEND_NAME

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class CascadeVerifyBackend(FlashInferAttnBackend):
    """See the module's text. Works eagerly and under CUDA graphs: all the tree's buffers are made here or at the
    first plan of a batch size, which is before its capture."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner, init_new_workspace=model_runner.init_new_workspace)
        config, tp_size = model_runner.model_config, get_parallel().attn_tp_size
        plain = self.dispatch_reason is None and not self.kv_index_translator.reads_are_translated
        if not plain or self.flashinfer_kv_cache_dtype != config.dtype:
            raise ConfigError(
                f"attention backend {BACKEND_NAME} serves full attention over a plain {config.dtype} KV cache only: "
                "use server.attention=flashinfer for this model"
            )
        self._table = model_runner.req_to_token_pool.req_to_token
        self._tree = FlashInferCascade(
            Limits(
                num_heads=config.num_attention_heads // tp_size,
                num_kv_heads=config.get_num_kv_heads(tp_size),
                head_dim=config.head_dim,
                dtype=config.dtype,
                max_requests=self._table.shape[0],
                max_nodes=model_runner.server_args.speculative_num_draft_tokens or 1,
                max_pages=self._table.shape[1],
                device=self._table.device,
            ),
            self.workspace_buffer,
        )

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if verifies_tree(forward_batch):
            self._tree.plan(tree_batch(forward_batch, self._table))
        else:
            super().init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        if verifies_tree(forward_batch):
            self._tree.plan(tree_batch(forward_batch, self._table))
        else:
            super().init_forward_metadata_out_graph(forward_batch, in_capture)

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
        if not verifies_tree(forward_batch):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        if layer.logit_cap:
            raise NotImplementedError(
                f"attention backend {BACKEND_NAME} knows no logit cap (layer {layer.layer_id}): "
                "use server.attention=flashinfer"
            )
        if k is not None and v is not None and save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_layer(forward_batch, layer), k, v)
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        heads = q.contiguous().view(-1, layer.tp_q_head_num, layer.head_dim)
        out = self._tree.run(heads, keys, values, layer.scaling)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def verifies_tree(forward_batch: ForwardBatch) -> bool:
    """Whether this forward is EAGLE's verification, captured or not."""
    mode, spec = forward_batch.forward_mode, forward_batch.spec_info
    return mode.is_target_verify() and spec is not None and spec.spec_input_type == SpecInputType.EAGLE_VERIFY


def tree_batch(forward_batch: ForwardBatch, table: torch.Tensor) -> TreeBatch:
    """The batch of an EAGLE verification: `seq_lens` are the prefixes, and the nodes' slots follow them in `table`.

    table: [requests, context] int32, SGLang's `req_to_token`. A captured batch is padded with requests that SGLang's
    mask does not cover; they see everything.
    """
    requests = forward_batch.batch_size
    nodes = forward_batch.spec_info.draft_token_num
    prefix = forward_batch.seq_lens[:requests].long()
    rows = table[forward_batch.req_pool_indices[:requests].long()]
    mask = tree_block(forward_batch.spec_info.custom_mask, prefix, nodes)
    return TreeBatch(rows, prefix + nodes, nodes, mask)
