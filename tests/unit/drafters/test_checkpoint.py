"""Checkpoints: bit for bit back, and one clear line for each way to be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftloop.core.errors import CheckpointError, DraftloopError, ManifestError
from draftloop.core.manifest import MANIFEST_FILE, Lineage, Manifest, TargetIdentity
from draftloop.drafters.checkpoint import load_drafter, save_drafter, verify_checkpoint
from draftloop.drafters.eagle3 import Eagle3Drafter
from draftloop.drafters.target import load_target_weights, target_identity

from .conftest import TINY


@pytest.fixture
def folder(tmp_path: Path, drafter: Eagle3Drafter, identity: TargetIdentity) -> Path:
    folder = tmp_path / "v1"
    lineage = Lineage(records=3, tokens=40, domains={"chat": 3})
    save_drafter(
        folder,
        TINY,
        drafter.state_dict(),
        version="v1",
        parent="v0",
        target=identity,
        lineage=lineage,
        metrics={"accept_length": 1.5},
    )
    return folder


def test_round_trip_is_bit_for_bit(folder: Path, drafter: Eagle3Drafter, identity: TargetIdentity) -> None:
    loaded, manifest = load_drafter(folder)
    assert loaded.config == TINY
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert (manifest.version, manifest.parent, manifest.dtype, manifest.metrics) == (
        "v1",
        "v0",
        "float32",
        {"accept_length": 1.5},
    )
    assert manifest.lineage.domains == {"chat": 3}
    assert verify_checkpoint(folder, identity, TINY.layer_ids) == manifest
    assert [path.name for path in folder.parent.iterdir()] == ["v1"]
    # The loaded drafter trains: no meta tensor is left.
    assert all(parameter.requires_grad and not parameter.is_meta for parameter in loaded.parameters())


def test_names_are_those_sglang_loads(drafter: Eagle3Drafter) -> None:
    projections = [f"midlayer.self_attn.{p}_proj.weight" for p in "qkvo"]
    mlp = [f"midlayer.mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    norms = [f"midlayer.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    expected = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", *projections, *mlp, *norms}
    assert set(drafter.state_dict()) == expected


def test_transformers_reads_the_config(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.draft_vocab_size == TINY.draft_vocab_size
    assert config.rope_parameters["rope_theta"] == TINY.rope_theta
    assert config.eagle_config["eagle_aux_hidden_state_layer_ids"] == list(TINY.layer_ids)
    assert (config.head_dim, config.tie_word_embeddings, config.num_hidden_layers) == (TINY.head_dim, False, 1)


def test_bfloat16_is_stored_as_it_is(tmp_path: Path, drafter: Eagle3Drafter, identity: TargetIdentity) -> None:
    state = drafter.to(torch.bfloat16).state_dict()
    save_drafter(tmp_path / "half", TINY, state, version="h", parent=None, target=identity)
    loaded, manifest = load_drafter(tmp_path / "half")
    assert manifest.dtype == "bfloat16"
    assert torch.equal(loaded.fc.weight, drafter.fc.weight)


def test_a_version_is_never_overwritten(folder: Path, drafter: Eagle3Drafter, identity: TargetIdentity) -> None:
    with pytest.raises(CheckpointError, match="never overwritten"):
        save_drafter(folder, TINY, drafter.state_dict(), version="v1", parent=None, target=identity)


def test_a_broken_state_is_not_written(tmp_path: Path, drafter: Eagle3Drafter, identity: TargetIdentity) -> None:
    state = drafter.state_dict()
    state["norm.weight"][0] = float("inf")
    with pytest.raises(CheckpointError, match=r"norm\.weight holds NaN"):
        save_drafter(tmp_path / "bad", TINY, state, version="b", parent=None, target=identity)
    assert list(tmp_path.iterdir()) == []


def _edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])


def _flip_last_byte(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def _edit_json(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:  # type: ignore[type-arg]
    def apply(folder: Path) -> None:
        raw = json.loads((folder / name).read_text())
        change(raw)
        (folder / name).write_text(json.dumps(raw))

    return apply


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (_edit(lambda t: t.pop("fc.weight")), "fc.weight is missing"),
    "extra": (_edit(lambda t: t.update(other=torch.zeros(1))), "other does not belong to a drafter of kind eagle3"),
    "shape": (_edit(lambda t: t.update({"norm.weight": torch.ones(5)})), r"norm.weight has shape \[5\]"),
    "dtype": (_edit(lambda t: t.update({"fc.weight": t["fc.weight"].half()})), "fc.weight is float16, not float32"),
    "all half": (
        _edit(lambda t: t.update({k: v.half() for k, v in t.items() if k != "d2t"})),
        "is float16 .*the manifest says float32",
    ),
    "integer": (_edit(lambda t: t.update({"d2t": t["d2t"].int()})), "d2t is int32, not int64"),
    "nan": (_edit(lambda t: t["fc.weight"].view(-1)[3:4].fill_(float("nan"))), "fc.weight holds NaN or inf"),
    "changed": (_edit(lambda t: t["fc.weight"].add_(1e-3)), "checksum of tensor fc.weight"),
    "bit flip": (_flip_last_byte, "checksum of tensor"),
    "map": (_edit(lambda t: t["d2t"].fill_(-3)), "strictly increasing"),
    "truncated": (_cut, "damaged or cut short"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "no manifest": (lambda f: (f / MANIFEST_FILE).unlink(), "not a draftloop drafter"),
    "config json": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "config key": (_edit_json("config.json", lambda c: c.pop("head_dim")), "lacks 'head_dim'"),
    "architecture": (
        _edit_json("config.json", lambda c: c.update(architectures=["X"])),
        "not LlamaForCausalLMEagle or LlamaForCausalLMEagle3",
    ),
    "layers": (_edit_json(MANIFEST_FILE, lambda m: m.update(layer_ids=[1, 2, 3])), "config.json fuses layers"),
    "map hash": (_edit_json(MANIFEST_FILE, lambda m: m.update(vocab_map_sha256="0")), "not the vocabulary map"),
    "unlisted": (_edit_json(MANIFEST_FILE, lambda m: m["tensors"].pop("d2t")), "d2t is not in the manifest"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_refusals_are_one_clear_line(folder: Path, name: str) -> None:
    damage, message = BROKEN[name]
    damage(folder)
    with pytest.raises(DraftloopError, match=message) as caught:
        load_drafter(folder)
    assert "\n" not in str(caught.value)


def test_verify_refuses_another_server(folder: Path, identity: TargetIdentity) -> None:
    other = identity.model_copy(update={"fingerprint": "e" * 64})
    with pytest.raises(ManifestError, match="was trained for target"):
        verify_checkpoint(folder, other, TINY.layer_ids)
    with pytest.raises(ManifestError, match="reads target layers"):
        verify_checkpoint(folder, identity, (0, 1, 3))
    assert verify_checkpoint(folder, identity, TINY.layer_ids) == Manifest.load(folder)


def _target_folder(folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "t"}))
    tensors = {"model.embed_tokens.weight": torch.ones(5, 3), "model.norm.weight": torch.full((3,), 2.0)}
    tensors |= {f"model.layers.{i}.input_layernorm.weight": torch.full((3,), float(i)) for i in (1, 3, 33)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_target_identity_sees_weights_and_config_but_not_where_they_lie(tmp_path: Path) -> None:
    config: dict[str, object] = {"hidden_size": 3, "vocab_size": 5, "num_hidden_layers": 4}
    first = _target_folder(tmp_path / "a", config)
    moved = _target_folder(tmp_path / "b", {**config, "transformers_version": "9", "_name_or_path": "x"})
    wider = _target_folder(tmp_path / "c", {**config, "rope_theta": 5.0})
    one = target_identity(first)
    assert (one.name, one.hidden_size, one.vocab_size, one.num_layers) == ("a", 3, 5, 4)
    assert one.fingerprint == target_identity(moved).fingerprint
    assert one.fingerprint != target_identity(wider).fingerprint
    (moved / "chat_template.jinja").write_text("other")
    assert target_identity(moved).chat_template_sha256 != one.chat_template_sha256
    save_file({"model.embed_tokens.weight": torch.zeros(5, 3)}, moved / "model.safetensors")
    assert target_identity(moved).fingerprint != one.fingerprint


def test_target_weights_fall_back_to_the_tied_head(tmp_path: Path) -> None:
    folder = _target_folder(tmp_path / "t", {"num_hidden_layers": 4})
    weights = load_target_weights(folder)
    assert weights.lm_head is weights.embedding
    assert weights.norm.tolist() == [2.0, 2.0, 2.0]
    assert {n: t.tolist() for n, t in weights.last_layer.items()} == {"input_layernorm.weight": [3.0, 3.0, 3.0]}
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors"):
        load_target_weights(folder)
