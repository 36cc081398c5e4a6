"""Leaner forwards of the three elementwise ops a decoder layer calls, registered through SGLang's own seam.

SGLang's native ones are written for clarity in many small torch calls; with one to eight rows a call costs as much
as its arithmetic. Anything unusual goes back to the native form.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

from draftloop.sglang.cpu.platform import DISPATCH_KEY


def register_ops() -> None:
    """Make SGLang dispatch to these on our platform (`get_dispatch_key_name`)."""
    for op, forward in ((RMSNorm, rms_norm), (SiluAndMul, silu_and_mul), (RotaryEmbedding, rotary)):
        BaseFusedOp.register_oot_forward(op, forward, DISPATCH_KEY)


def rms_norm(
    self: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    """RMSNorm of x [N, H], after adding the residual when there is one; returns (normed, new residual) then."""
    plain = (
        x.dtype == torch.float32
        and post_residual_addition is None
        and self.variance_size_override is None
        and self.override_orig_dtype is None
    )
    if not plain:
        return self.forward_native(x, residual, post_residual_addition, quant_linear)
    if residual is None:
        return F.rms_norm(x, (self.hidden_size,), self.weight, self.variance_epsilon)
    residual = x + residual
    return F.rms_norm(residual, (self.hidden_size,), self.weight, self.variance_epsilon), residual


def silu_and_mul(self: Any, x: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of x [N, 2*I]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotary(
    self: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query [N, h*d] and key [N, hk*d] (NeoX style: the head's two halves) in one go."""
    if not self.is_neox_style or self.rotary_dim != self.head_size or offsets is not None:
        rotated: tuple[torch.Tensor, torch.Tensor] = self.forward_native(
            positions, query, key, offsets, fused_set_kv_buffer_arg
        )
        return rotated
    cos, sin = self.cos_sin_cache.index_select(0, positions.flatten()).unsqueeze(1).chunk(2, dim=-1)
    heads = torch.cat((query, key), dim=-1).view(cos.shape[0], -1, self.head_size)
    left, right = heads.chunk(2, dim=-1)
    turned = torch.empty_like(heads)
    torch.sub(left * cos, right * sin, out=turned[..., : self.head_size // 2])
    torch.add(right * cos, left * sin, out=turned[..., self.head_size // 2 :])
    flat = turned.view(cos.shape[0], -1)
    return flat[:, : query.shape[-1]], flat[:, query.shape[-1] :]
