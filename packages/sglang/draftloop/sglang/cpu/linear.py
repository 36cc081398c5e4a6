"""Linear layers with weights packed once for oneDNN.

The stock path of a small matrix product (2 to 16 rows) costs nearly twice a single row's, though both only
stream the weights; the packed one costs about the same, and that is what makes a tree's verification pay.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

# Packed for this many rows: measured as good as any from 1 to 128 rows. A prefill chunk takes the stock path.
PACKED_FOR_ROWS = 8
MOST_PACKED_ROWS = 256


def pack(weight: torch.Tensor) -> torch.Tensor:
    """An opaque oneDNN copy of weight [out, in]."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR_ROWS)


def packed_linear(
    x: torch.Tensor, weight: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [..., in] @ weight[out, in].T + bias."""
    if x.numel() // x.shape[-1] > MOST_PACKED_ROWS:
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class PackedLinearMethod(UnquantizedLinearMethod):
    """SGLang's unquantized linear method over the packed copy.

    `process_weights_after_loading` also runs at the end of a weight-update session
    (`DefaultModelLoader.postprocess_weights`), so a hot-swapped drafter is packed anew.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.draftloop_packed = pack(layer.weight)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return packed_linear(x, layer.weight, layer.draftloop_packed, bias)


class PackedHeadMethod(UnquantizedEmbeddingMethod):
    """The same for an output head (which may also serve as the embedding)."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.draftloop_packed = pack(layer.weight)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return packed_linear(x, layer.weight, layer.draftloop_packed, bias)


def pack_model(model: torch.nn.Module) -> None:
    """Give every unquantized linear layer of `model`, and its output head, a packed method.

    Methods are compared by exact type: SGLang's subclasses do something else with their weights. A tied head is the
    embedding itself; its look-ups still read the plain weight.
    """
    linear = PackedLinearMethod()
    for module in model.modules():
        if isinstance(module, LinearBase) and type(module.quant_method) is UnquantizedLinearMethod:
            _replace_method(module, linear)
    head = model.lm_head if "lm_head" in dict(model.named_children()) else None
    if isinstance(head, VocabParallelEmbedding) and type(head.quant_method) is UnquantizedEmbeddingMethod:
        _replace_method(head, PackedHeadMethod())


def _replace_method(module: Any, method: Any) -> None:
    module.quant_method = method
    method.process_weights_after_loading(module)
