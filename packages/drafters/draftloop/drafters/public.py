"""Drafters published by others: EAGLE-3 as its authors export it, DFlash likewise, and the `speculators` format.

They come without a manifest, so what can be checked is checked here against the target's `config.json`, in one
line, and the drafter is then saved with a manifest of its own. Two things no file can tell are the reader's to
know: the chat template it was trained with, and whether its layer ids mean outputs (they do in all three formats).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftloop.core.errors import CheckpointError
from draftloop.drafters.dflash import DflashConfig
from draftloop.drafters.dflash import default_layer_ids as dflash_layer_ids
from draftloop.drafters.drafter import Drafter, Shape, shape_of_target
from draftloop.drafters.eagle3 import Eagle3Config, default_layer_ids
from draftloop.drafters.layouts import WEIGHT_DTYPES, build, tensor_shapes
from draftloop.drafters.vocab import check_draft_ids, ids_from_offsets

# The target's own embedding, head and norm, and maps that `d2t` already says; SGLang ignores them too.
_NOT_OURS = ("embed_tokens.weight", "t2d", "rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
# How far a copy of the embedding may lie from the target's: a rounding to bf16.
_ROUNDING = 2**-7


def load_public(folder: Path, target: Mapping[str, Any], embedding: Tensor) -> Drafter:
    """Read a published drafter for a target, given the target's parsed `config.json` and its embedding [V, H]."""
    raw = _read_json(folder / "config.json")
    config = public_config(raw, target)
    tensors = _read_tensors(folder)
    _check_maps(folder, tensors)
    _check_embedding(folder, tensors, embedding)
    shapes = tensor_shapes(config)
    # DFlash's head is the target's.
    others = (*_NOT_OURS, "lm_head.weight") if isinstance(config, DflashConfig) else _NOT_OURS
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(others)}
    if missing := sorted(shapes.keys() - kept.keys()):
        raise CheckpointError(f"{folder}: tensor {missing[0]} is missing; this is no drafter of its config.json")
    if extra := sorted(kept.keys() - shapes.keys()):
        raise CheckpointError(f"{folder}: tensor {extra[0]} is not part of this drafter; its variant is not supported")
    for name, tensor in kept.items():
        if tuple(tensor.shape) != shapes[name]:
            raise CheckpointError(f"{folder}: tensor {name} has shape {list(tensor.shape)}, not {list(shapes[name])}")
        if name != "d2t" and tensor.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(f"{folder}: tensor {name} is {tensor.dtype}: quantised; export the drafter in bf16")
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{folder}: tensor {name} holds NaN or infinite values; do not serve this drafter")
    if "d2t" in kept:
        check_draft_ids(ids_from_offsets(kept["d2t"]), config.vocab_size)
    with torch.device("meta"):
        drafter = build(config)
    drafter.load_state_dict(kept, assign=True)
    return drafter


def public_config(raw: Mapping[str, Any], target: Mapping[str, Any]) -> Shape:
    """The shape a published `config.json` describes. Raises CheckpointError where it does not fit the target."""
    if raw.get("quantization_config") is not None:
        raise CheckpointError("the drafter is quantised; a drafter is trained and swapped in bf16, fp16 or fp32")
    if raw.get("speculators_model_type") is not None:
        return _speculators(raw, target)
    match raw.get("architectures"):
        case ["LlamaForCausalLMEagle3"]:
            ids = raw.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
            return _eagle3(raw, raw, ids, target)
        case ["DFlashDraftModel"]:
            return _dflash(raw, target)
    raise CheckpointError(f"config.json describes {raw.get('architectures')}, which is no drafter draftloop knows")


def _eagle3(
    layer: Mapping[str, Any], raw: Mapping[str, Any], ids: list[int] | None, target: Mapping[str, Any]
) -> Eagle3Config:
    shape, depth = _fitting_shape(layer, target), int(target["num_hidden_layers"])
    size = int(raw.get("draft_vocab_size") or shape["vocab_size"])
    if raw.get("tie_word_embeddings") and size != shape["vocab_size"]:
        raise CheckpointError("the drafter ties its head to the embedding, but its vocabulary is smaller: no such head")
    if ids and not all(0 <= i < depth - 1 for i in ids):
        raise CheckpointError(
            f"the drafter reads layers {ids} of a {depth}-layer target; ids are outputs of layer i, from 0 to "
            f"{depth - 2}: an exporter that counts the embedding as layer 0 is off by one"
        )
    return Eagle3Config(**shape, layer_ids=tuple(ids) if ids else default_layer_ids(depth), draft_vocab_size=size)


def _dflash(raw: Mapping[str, Any], target: Mapping[str, Any]) -> DflashConfig:
    own, depth = raw.get("dflash_config", {}), int(target["num_hidden_layers"])
    if unknown := sorted(own.keys() - {"target_layer_ids", "mask_token_id", "mask_token", "block_size"}):
        raise CheckpointError(f"config.json: dflash_config.{unknown[0]} names a variant that is not supported")
    if "mask_token_id" not in own:
        raise CheckpointError("config.json: dflash_config.mask_token_id is missing; the mask token cannot be guessed")
    if int(raw.get("num_target_layers", depth)) != depth:
        raise CheckpointError(f"the drafter is for {raw['num_target_layers']} target layers, the target has {depth}")
    return DflashConfig(
        **_fitting_shape(raw, target),
        layer_ids=tuple(own.get("target_layer_ids") or dflash_layer_ids(depth, int(raw["num_hidden_layers"]))),
        num_layers=int(raw["num_hidden_layers"]),
        block_size=int(own.get("block_size") or raw.get("block_size", 16)),
        mask_token_id=int(own["mask_token_id"]),
        num_target_layers=depth,
    )


def _speculators(raw: Mapping[str, Any], target: Mapping[str, Any]) -> Shape:
    match raw["speculators_model_type"]:
        case "eagle3":
            return _speculators_eagle3(raw, target)
        case "dflash":
            return _speculators_dflash(raw, target)
    raise CheckpointError(f"speculators model {raw['speculators_model_type']} is not supported, only eagle3 and dflash")


def _speculators_dflash(raw: Mapping[str, Any], target: Mapping[str, Any]) -> DflashConfig:
    layer = raw["transformer_layer_config"]
    if raw.get("sample_from_anchor"):
        raise CheckpointError("the drafter guesses from the anchor's own slot; in SGLang's block that token is known")
    if int(raw.get("draft_vocab_size", target["vocab_size"])) != int(target["vocab_size"]):
        raise CheckpointError("a DFlash drafter of a smaller vocabulary is not supported: its head is the target's")
    if "sliding_attention" in layer.get("layer_types", ()):
        raise CheckpointError("the drafter has sliding-window layers, which are not supported")
    dflash = {"target_layer_ids": raw.get("aux_hidden_state_layer_ids"), "block_size": raw.get("block_size", 8)}
    if raw.get("mask_token_id") is not None:
        dflash["mask_token_id"] = raw["mask_token_id"]
    return _dflash({**layer, "dflash_config": dflash}, target)


def _speculators_eagle3(raw: Mapping[str, Any], target: Mapping[str, Any]) -> Eagle3Config:
    if raw.get("norm_before_residual"):
        raise CheckpointError("norm_before_residual adds the normed feature; SGLang's layer adds the un-normed one")
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    return _eagle3(raw["transformer_layer_config"], raw, ids, target)


def _fitting_shape(layer: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
    """The layer's shape by the names of `Shape`; embedding and head are the target's, so two sizes must agree."""
    if layer.get("attention_bias"):
        raise CheckpointError("the drafter has attention biases, which are not supported")
    if layer.get("rope_scaling"):
        raise CheckpointError("the drafter scales its rotary positions, which is not supported")
    shape = shape_of_target(layer)
    for name in ("hidden_size", "vocab_size"):
        if shape[name] != int(target[name]):
            raise CheckpointError(f"the drafter's {name} is {shape[name]}, the target's {target[name]}: another target")
    return shape


def _check_maps(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """`t2d` [V] bool and `d2t` [Vd] say the same thing twice; where they differ one of them is wrong."""
    if "d2t" in tensors and "t2d" in tensors:
        said = tensors["t2d"].bool().nonzero().flatten()
        if not torch.equal(said, ids_from_offsets(tensors["d2t"].long())):
            raise CheckpointError(f"{folder}: t2d and d2t describe different draft vocabularies; do not serve it")


def _check_embedding(folder: Path, tensors: Mapping[str, Tensor], embedding: Tensor) -> None:
    """A drafter is trained on the target's embedding. One that carries another was trained on that, or on nothing."""
    for name, tensor in tensors.items():
        if name.endswith("embed_tokens.weight") and not (
            tensor.shape == embedding.shape and torch.allclose(tensor.float(), embedding, rtol=_ROUNDING, atol=1e-6)
        ):
            raise CheckpointError(f"{folder}: {name} is not the target's embedding: trained on another, or never set")


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no .safetensors file; convert the drafter to safetensors")
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors |= load_file(path)
    # `speculators` calls EAGLE-3's one layer layers.0.
    renamed = any(name.startswith("layers.0.hidden_norm") for name in tensors)
    return {name.replace("layers.0.", "midlayer.") if renamed else name: t for name, t in tensors.items()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return cast(dict[str, Any], json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no config.json: it is not a drafter checkpoint") from None
    except ValueError:
        raise CheckpointError(f"{path} is not valid JSON; download the drafter again") from None
