"""What holds for every kind of drafter: checkpoints, the gate's metric, and drafters published by others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftloop.core.errors import CheckpointError, DraftloopError
from draftloop.core.manifest import MANIFEST_FILE, TargetIdentity, vocab_map_sha256
from draftloop.drafters.checkpoint import load_any, load_drafter, save_drafter, verify_checkpoint
from draftloop.drafters.dflash import DflashDrafter
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.eagle1 import Eagle1Drafter
from draftloop.drafters.eagle3 import Eagle3Drafter
from draftloop.drafters.metrics import expected_accepted_length, prepare_holdout
from draftloop.drafters.public import load_public
from draftloop.drafters.target import FrozenTarget

from .conftest import DFLASH, EAGLE1, HIDDEN, TINY, VOCAB, make_record

KINDS = ["eagle1", "eagle3", "dflash"]


@pytest.fixture
def any_drafter(request: pytest.FixtureRequest) -> Drafter:
    name: str = request.param
    drafter: Drafter = request.getfixturevalue("drafter" if name == "eagle3" else name)
    return drafter


@pytest.mark.parametrize("any_drafter", KINDS, indirect=True)
def test_round_trip_is_bit_for_bit(tmp_path: Path, any_drafter: Drafter, identity: TargetIdentity) -> None:
    folder = tmp_path / "v1"
    written = save_drafter(
        folder, any_drafter.shape, any_drafter.state_dict(), version="v1", parent=None, target=identity
    )
    loaded, manifest = load_any(folder)
    assert type(loaded) is type(any_drafter)
    assert loaded.shape == any_drafter.shape
    assert manifest == written
    assert manifest.kind == any_drafter.kind
    for name, tensor in any_drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert verify_checkpoint(folder, identity, any_drafter.shape.layer_ids) == manifest
    if not isinstance(any_drafter, Eagle3Drafter):
        assert manifest.draft_vocab_size == VOCAB
        assert manifest.vocab_map_sha256 == vocab_map_sha256(torch.empty(0, dtype=torch.int64).numpy())
        with pytest.raises(CheckpointError, match=f"of kind {manifest.kind}, not eagle3"):
            load_drafter(folder)


@pytest.mark.parametrize("any_drafter", KINDS, indirect=True)
def test_transformers_reads_the_config(tmp_path: Path, any_drafter: Drafter, identity: TargetIdentity) -> None:
    transformers = pytest.importorskip("transformers")
    save_drafter(tmp_path / "v", any_drafter.shape, any_drafter.state_dict(), version="v", parent=None, target=identity)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "v")
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (HIDDEN, 6, VOCAB)
    if isinstance(any_drafter, DflashDrafter):
        assert config.dflash_config == {"target_layer_ids": [0, 2], "mask_token_id": 7}
        assert (config.block_size, config.num_target_layers, config.num_hidden_layers) == (4, 4, 2)
        assert set(config.layer_types) == {"full_attention"}


def test_kinds_are_not_mixed_up(tmp_path: Path, dflash: DflashDrafter, identity: TargetIdentity) -> None:
    folder = tmp_path / "v1"
    save_drafter(folder, DFLASH, dflash.state_dict(), version="v1", parent=None, target=identity)
    manifest = folder / MANIFEST_FILE
    manifest.write_text(manifest.read_text().replace('"kind": "dflash"', '"kind": "eagle1"'))
    with pytest.raises(CheckpointError, match="of kind dflash, the manifest one of eagle1"):
        load_any(folder)


def test_the_ablation_without_shifted_token_is_not_exported(
    tmp_path: Path, eagle1: Eagle1Drafter, identity: TargetIdentity
) -> None:
    with pytest.raises(CheckpointError, match="ablation that SGLang cannot serve"):
        save_drafter(
            tmp_path / "v", EAGLE1.without_shifted_token(), eagle1.state_dict(), version="v", parent=None,
            target=identity,
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("any_drafter", KINDS, indirect=True)
def test_expected_accepted_length_is_one_guess_at_a_time(any_drafter: Drafter, frozen: FrozenTarget) -> None:
    layers = max(len(any_drafter.shape.layer_ids), 1)
    records = [make_record(14, 4, 1, layers=layers), make_record(9, 1, 2, layers=layers)]
    holdout = prepare_holdout(records, frozen, 64, "cpu")
    score = expected_accepted_length(any_drafter, holdout, frozen, (2, 1, 1))
    lengths = []
    for batch, _, greedy in holdout.batches:
        for row in range(len(batch.lengths)):
            record = records[0] if int(batch.lengths[row]) == 14 else records[1]
            for t in range(record.num_tokens - 3):
                if t + 1 >= record.prompt_len:
                    where = torch.zeros(len(batch.lengths), 1, dtype=torch.int64)
                    where[row] = t
                    length = 1.0
                    for step, feature in enumerate(any_drafter.guess(batch, frozen, where, 3)):
                        order = any_drafter.guess_logits(feature[row, 0], frozen).argsort(descending=True)
                        best = any_drafter.draft_ids()[order[: (2, 1, 1)[step]]]
                        if int(greedy[row, t + 1 + step]) not in best.tolist():
                            break
                        length += 1
                    lengths.append(length)
    assert score.positions == len(lengths)
    assert score.accept_length == pytest.approx(sum(lengths) / len(lengths))


TARGET: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 16,
    "vocab_size": VOCAB, "num_hidden_layers": 4, "max_position_embeddings": 64, "head_dim": 6, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA = {**TARGET, "num_hidden_layers": 1, "rope_theta": 10000.0}


def _public(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def _with_maps(drafter: Eagle3Drafter) -> dict[str, torch.Tensor]:
    chosen = torch.zeros(VOCAB, dtype=torch.bool)
    chosen[drafter.draft_ids()] = True
    return {**drafter.state_dict(), "t2d": chosen}


def _same(loaded: Drafter, drafter: Drafter) -> bool:
    return all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())


def test_the_authors_eagle3_loads(tmp_path: Path, drafter: Eagle3Drafter) -> None:
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 11}
    loaded = load_public(_public(tmp_path / "p", config, _with_maps(drafter)), TARGET)
    assert _same(loaded, drafter)
    assert loaded.shape == TINY


def test_speculators_eagle3_loads(tmp_path: Path, drafter: Eagle3Drafter) -> None:
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 11,
        "norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "transformer_layer_config": LLAMA,
    }  # fmt: skip
    tensors = {name.replace("midlayer.", "layers.0."): t for name, t in _with_maps(drafter).items()}
    tensors["embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
    assert _same(load_public(_public(tmp_path / "p", config, tensors), TARGET), drafter)
    with pytest.raises(CheckpointError, match="norm_before_residual"):
        load_public(_public(tmp_path / "p", {**config, "norm_before_residual": True}, tensors), TARGET)


def test_the_authors_dflash_loads(tmp_path: Path, dflash: DflashDrafter) -> None:
    config = {
        **LLAMA, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "block_size": 4,
        "num_target_layers": 4, "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]},
    }  # fmt: skip
    loaded = load_public(_public(tmp_path / "p", config, dict(dflash.state_dict())), TARGET)
    assert _same(loaded, dflash)
    assert loaded.shape == DFLASH


PITFALLS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], str]] = {
    "another target": ({"hidden_size": 24}, {}, "another target"),
    "another vocabulary": ({"vocab_size": 30}, {}, "another target"),
    "biases": ({"attention_bias": True}, {}, "attention biases"),
    "long rope": ({"rope_scaling": {"type": "yarn"}}, {}, "scales its rotary positions"),
    "kind": ({"architectures": ["LlamaForCausalLM"]}, {}, "no drafter draftloop knows"),
    "map and mask differ": ({}, {"t2d": torch.ones(VOCAB, dtype=torch.bool)}, "different draft vocabularies"),
    "ids for offsets": ({}, {"d2t": torch.arange(11) * 5, "t2d": torch.zeros(1)}, "different draft vocabularies"),
    "shape": ({}, {"fc.weight": torch.zeros(3, 3)}, "fc.weight has shape"),
    "nan": ({}, {"norm.weight": torch.full((HIDDEN,), torch.nan)}, "holds NaN"),
    "variant": ({}, {"midlayer.gate.weight": torch.zeros(1)}, "variant is not supported"),
}


@pytest.mark.parametrize("name", PITFALLS)
def test_public_pitfalls_are_refused_in_one_line(tmp_path: Path, drafter: Eagle3Drafter, name: str) -> None:
    changes, tensors, message = PITFALLS[name]
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 11, **changes}
    folder = _public(tmp_path / "p", config, {**_with_maps(drafter), **tensors})
    with pytest.raises(DraftloopError, match=message) as caught:
        load_public(folder, TARGET)
    assert "\n" not in str(caught.value)
