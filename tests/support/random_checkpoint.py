"""A checkpoint of a real model's shape and random weights, so that nothing need be downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

STD = 0.02
SHARD_BYTES = 4 << 30


def write_random_llama(folder: Path, shape: Mapping[str, Any], device: torch.device) -> None:
    """Replace the weights and the config in `folder` by bf16 ones of this `config.json`; the tokenizer stays.

    The numbers are made on `device`, a shard of 4 GiB at a time.
    """
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    config = AutoConfig.for_model(**shape)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    config.save_pretrained(folder)
    with torch.device("meta"):
        wanted = AutoModelForCausalLM.from_config(config).state_dict()
    index: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    names = list(wanted)
    for place, name in enumerate(names):
        made = torch.empty(wanted[name].shape, dtype=torch.bfloat16, device=device)
        shard[name] = (made.fill_(1.0) if "norm" in name else made.normal_(0.0, STD)).cpu()
        if place == len(names) - 1 or sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            file = f"model-{len(set(index.values())) + 1:05}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(shard, file)
            shard.clear()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
