"""A drafter's tensors as SGLang's draft model holds them, which is not as its checkpoint stores them.

checkpoint                                   server
midlayer.self_attn.{q,k,v}_proj.weight       model.layers.0.self_attn.qkv_proj.weight    [(q+2kv)*D, 2H]
midlayer.mlp.{gate,up}_proj.weight           model.layers.0.mlp.gate_up_proj.weight      [2I, H]
lm_head.weight  [Vd, H]                      lm_head.weight, rows padded to a multiple of 64
NAME of an EAGLE-1 head                      model.NAME
d2t  [Vd], offsets                           hot_token_id  [Vd], target ids
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from draftloop.core.manifest import DrafterKind
from draftloop.drafters.vocab import ids_from_offsets

# Parts of tensor names that are the target's own tensors: never pushed, never hashed. An EAGLE-1 head borrows both.
ALIASED: dict[DrafterKind, tuple[str, ...]] = {
    "eagle1": ("embed_tokens", "lm_head"),
    "eagle2": ("embed_tokens", "lm_head"),
    "eagle3": ("embed_tokens",),
    "dflash": ("embed_tokens",),
}
VOCAB_MAP = "hot_token_id"
# SGLang pads a head's rows to this multiple (layers/vocab_parallel_embedding.py).
VOCAB_PADDING = 64
# Projections that SGLang keeps as one matrix, found by their first part.
FUSED = re.compile(r"\.(q|k|v|gate|up)_proj\.weight$")
FIRST_PARTS = {"q": ("q", "k", "v"), "gate": ("gate", "up")}


def server_tensors(state: Mapping[str, torch.Tensor], kind: DrafterKind) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors by the server's names, in the checkpoint's dtype. See the module's table.

    Raises ValueError when head and vocabulary map disagree, which the padding would hide.
    """
    held: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        fused = FUSED.search(name)
        if fused is None:
            held[name] = tensor
        elif fused[1] in FIRST_PARTS:
            parts = FIRST_PARTS[fused[1]]
            whole = name.replace(f"{fused[1]}_proj", f"{'qkv' if fused[1] == 'q' else 'gate_up'}_proj")
            held[whole] = torch.cat([state[name.replace(f"{fused[1]}_proj", f"{part}_proj")] for part in parts])
    if kind == "dflash":
        return held
    if kind != "eagle3":
        return {f"model.{name}": tensor for name, tensor in held.items()}
    offsets = held.pop("d2t", None)
    head = held.pop("lm_head.weight")
    named = {f"model.{name.replace('midlayer', 'layers.0')}": tensor for name, tensor in held.items()}
    named["lm_head.weight"] = torch.nn.functional.pad(head, (0, 0, 0, -head.shape[0] % VOCAB_PADDING))
    if offsets is not None:
        if len(offsets) != len(head):
            raise ValueError(f"d2t names {len(offsets)} tokens, lm_head has {len(head)} rows")
        named[VOCAB_MAP] = ids_from_offsets(offsets)
    return named
