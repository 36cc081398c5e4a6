"""How each kind of drafter lies on disk: the `config.json` SGLang builds it from, and back.

    kind      architecture              one file's own keys
    eagle1    LlamaForCausalLMEagle     (none: one Llama layer, the target's embedding and head)
    eagle3    LlamaForCausalLMEagle3    draft_vocab_size, eagle_config.eagle_aux_hidden_state_layer_ids
    dflash    DFlashDraftModel          block_size, num_target_layers, dflash_config.{target_layer_ids, mask_token_id}

EAGLE-2 is EAGLE-1's head drafted as another tree, so it has no layout of its own. Layer ids are outputs of layer i
everywhere, which is SGLang's convention for both keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftloop.core.errors import CheckpointError
from draftloop.core.manifest import DrafterKind
from draftloop.drafters.dflash import DflashConfig, DflashDrafter
from draftloop.drafters.drafter import Drafter, Shape
from draftloop.drafters.eagle1 import Eagle1Config, Eagle1Drafter
from draftloop.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftloop.drafters.vocab import ids_from_offsets

ARCHITECTURES: dict[DrafterKind, str] = {
    "eagle1": "LlamaForCausalLMEagle",
    "eagle3": "LlamaForCausalLMEagle3",
    "dflash": "DFlashDraftModel",
}


# What a drafter is trained, kept and swapped in. FP8 weights would load, and give NaN states.
WEIGHT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def kind_of(config: Shape) -> DrafterKind:
    """The kind a config describes."""
    match config:
        case Eagle3Config():
            return "eagle3"
        case Eagle1Config():
            return "eagle1"
        case DflashConfig():
            return "dflash"
    raise TypeError(f"{type(config).__name__} describes no drafter")


def build(config: Shape) -> Drafter:
    """The drafter of a config, its weights not set."""
    match config:
        case Eagle3Config():
            return Eagle3Drafter(config)
        case Eagle1Config():
            return Eagle1Drafter(config)
        case DflashConfig():
            return DflashDrafter(config)
    raise TypeError(f"{type(config).__name__} describes no drafter")


def tensor_shapes(config: Shape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor a drafter of this shape stores."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in build(config).state_dict().items()}


def draft_vocab(config: Shape, tensors: Mapping[str, Tensor]) -> tuple[int, Tensor]:
    """The size of the draft vocabulary and its map [Vd]; the map is empty for the whole vocabulary."""
    if isinstance(config, Eagle3Config):
        return config.draft_vocab_size, ids_from_offsets(tensors["d2t"])
    return config.vocab_size, torch.empty(0, dtype=torch.int64)


def hf_config(config: Shape, dtype: str) -> dict[str, Any]:
    """The `config.json` from which SGLang builds the drafter."""
    common = {
        "architectures": [ARCHITECTURES[kind_of(config)]],
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
    match config:
        case Eagle3Config():
            eagle = {"eagle_aux_hidden_state_layer_ids": list(config.layer_ids), "use_aux_hidden_state": True}
            own: dict[str, Any] = {"draft_vocab_size": config.draft_vocab_size, "eagle_config": eagle}
            return {**common, "model_type": "llama", "num_hidden_layers": 1, **own}
        case DflashConfig():
            dflash = {"target_layer_ids": list(config.layer_ids), "mask_token_id": config.mask_token_id}
            own = {"block_size": config.block_size, "num_target_layers": config.num_target_layers}
            return {
                **common,
                "model_type": "qwen3",
                "num_hidden_layers": config.num_layers,
                **own,
                "dflash_config": dflash,
            }
        case Eagle1Config(shifted_token=False):
            raise CheckpointError("an EAGLE-1 head without the shifted token is an ablation that SGLang cannot serve")
        case _:
            return {**common, "model_type": "llama", "num_hidden_layers": 1}


def parse_hf_config(raw: Mapping[str, Any]) -> Shape:
    """The inverse of `hf_config`. Raises KeyError for a key that lacks, CheckpointError for an unknown kind."""
    shape = {
        "hidden_size": raw["hidden_size"],
        "num_heads": raw["num_attention_heads"],
        "num_kv_heads": raw["num_key_value_heads"],
        "head_dim": raw["head_dim"],
        "intermediate_size": raw["intermediate_size"],
        "rms_norm_eps": raw["rms_norm_eps"],
        "rope_theta": raw["rope_theta"],
        "vocab_size": raw["vocab_size"],
        "max_position_embeddings": raw["max_position_embeddings"],
    }
    match raw["architectures"]:
        case ["LlamaForCausalLMEagle3"]:
            layer_ids = tuple(raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
            return Eagle3Config(**shape, layer_ids=layer_ids, draft_vocab_size=raw["draft_vocab_size"])
        case ["LlamaForCausalLMEagle"]:
            return Eagle1Config(**shape, layer_ids=())
        case ["DFlashDraftModel"]:
            return DflashConfig(
                **shape,
                layer_ids=tuple(raw["dflash_config"]["target_layer_ids"]),
                num_layers=raw["num_hidden_layers"],
                block_size=raw["block_size"],
                mask_token_id=raw["dflash_config"]["mask_token_id"],
                num_target_layers=raw["num_target_layers"],
            )
    raise CheckpointError(f"config.json describes {raw['architectures']}, not {' or '.join(ARCHITECTURES.values())}")
