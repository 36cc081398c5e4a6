"""What a drafter needs of its target: the frozen embedding and head, and the identity it is bound to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftloop.core.errors import CheckpointError
from draftloop.core.manifest import TargetIdentity, sha256_bytes
from draftloop.drafters.objectives import draft_distribution

_FULL_HASH_BYTES = 1 << 30
_CHUNK = 1 << 20
_SAMPLED_CHUNKS = 64
# Fields of config.json that change without the model changing.
_VOLATILE_CONFIG = ("_name_or_path", "transformers_version")


@dataclass(frozen=True)
class FrozenTarget:
    """embedding: [V, H].  lm_head: [V, H].  draft_head: [Vd, H], the head's rows of the draft vocabulary (the head
    itself where a drafter speaks the whole vocabulary)."""

    embedding: Tensor
    lm_head: Tensor
    draft_head: Tensor

    @classmethod
    def of(cls, embedding: Tensor, lm_head: Tensor, draft_ids: Tensor | None) -> FrozenTarget:
        """draft_ids: [Vd] int64 target ids; None for the whole vocabulary."""
        head = lm_head.detach()
        return cls(embedding.detach(), head, head if draft_ids is None else head[draft_ids])

    def to(self, device: torch.device | str) -> FrozenTarget:
        return FrozenTarget(self.embedding.to(device), self.lm_head.to(device), self.draft_head.to(device))

    @torch.no_grad()
    def draft_probs(self, last_hidden: Tensor) -> Tensor:
        """[M, H] final hidden states -> [M, Vd] the target's distribution over the draft vocabulary."""
        return draft_distribution(last_hidden @ self.draft_head.T)

    @torch.no_grad()
    def greedy_tokens(self, last_hidden: Tensor, chunk: int = 256) -> Tensor:
        """[M, H] -> [M] int64: the arg-max over the FULL vocabulary, a chunk of rows at a time."""
        return torch.cat([(rows @ self.lm_head.T).argmax(-1) for rows in torch.split(last_hidden, chunk)])


@dataclass(frozen=True)
class TargetWeights:
    """The tensors of a target checkpoint a drafter starts from, fp32.

    embedding, lm_head: [V, H] (one tensor when tied).  norm: [H], the final norm.  last_layer: the last
    decoder layer, names without their prefix ("self_attn.q_proj.weight", ...).
    """

    embedding: Tensor
    lm_head: Tensor
    norm: Tensor
    last_layer: dict[str, Tensor]


def read_target_config(folder: Path) -> dict[str, Any]:
    """The parsed `config.json` of an HF checkpoint folder."""
    path = folder / "config.json"
    try:
        return cast(dict[str, Any], json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json: it is not a Hugging Face checkpoint folder") from None
    except ValueError:
        raise CheckpointError(f"{path} is not valid JSON; copy the checkpoint again") from None


def end_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence ids of a parsed `config.json`."""
    ids = config.get("eos_token_id")
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


def load_target_weights(folder: Path) -> TargetWeights:
    """Read embedding, head, final norm and last layer, and nothing else, from an HF checkpoint folder."""
    layer = f"model.layers.{read_target_config(folder)['num_hidden_layers'] - 1}."
    wanted = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", layer)
    found = _read_tensors(_weight_files(folder), wanted)
    embedding, norm = found.get("model.embed_tokens.weight"), found.get("model.norm.weight")
    if embedding is None or norm is None:
        raise CheckpointError(f"{folder} has no model.embed_tokens.weight or model.norm.weight: not a Llama-like model")
    return TargetWeights(
        embedding=embedding,
        lm_head=found.get("lm_head.weight", embedding),
        norm=norm,
        last_layer={name.removeprefix(layer): t for name, t in found.items() if name.startswith(layer)},
    )


def target_identity(folder: Path) -> TargetIdentity:
    """What of the checkpoint in `folder` a drafter depends on, with hashes of the files' contents."""
    config = read_target_config(folder)
    stable = {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG}
    fingerprint = hashlib.sha256(json.dumps(stable, sort_keys=True).encode())
    for path in _weight_files(folder):
        fingerprint.update(path.name.encode() + _file_digest(path))
    return TargetIdentity(
        name=folder.resolve().name,
        fingerprint=fingerprint.hexdigest(),
        hidden_size=int(config["hidden_size"]),
        vocab_size=int(config["vocab_size"]),
        num_layers=int(config["num_hidden_layers"]),
        tokenizer_sha256=sha256_bytes(_read_or_empty(folder / "tokenizer.json")),
        chat_template_sha256=sha256_bytes(_chat_template(folder)),
    )


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no .safetensors file; save the target as a safetensors checkpoint")
    return files


def _read_tensors(files: list[Path], prefixes: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors whose names start with one of the prefixes, fp32."""
    found: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(str(path), framework="pt") as file:
                names = [name for name in file.keys() if name.startswith(prefixes)]  # noqa: SIM118 - not a mapping
                found |= {name: file.get_tensor(name).float() for name in names}
        except SafetensorError as err:
            raise CheckpointError(f"{path} cannot be read ({err}); copy the checkpoint again") from None
    return found


def _file_digest(path: Path) -> bytes:
    """sha256 of a file; of one over 1 GiB, its size, its head (the safetensors header) and 64 spread chunks."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _FULL_HASH_BYTES:
            while block := file.read(_CHUNK):
                digest.update(block)
            return digest.digest()
        for index in range(_SAMPLED_CHUNKS):
            file.seek((size - _CHUNK) * index // (_SAMPLED_CHUNKS - 1))
            digest.update(file.read(_CHUNK))
    return digest.digest()


def _chat_template(folder: Path) -> bytes:
    template = folder / "chat_template.jinja"
    if template.exists():
        return template.read_bytes()
    raw = _read_or_empty(folder / "tokenizer_config.json") or b"{}"
    config: Mapping[str, Any] = json.loads(raw)
    return json.dumps(config.get("chat_template")).encode()


def _read_or_empty(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
