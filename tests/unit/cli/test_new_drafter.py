"""`draftloop new-drafter` and `server-command`: what an operator makes before anything starts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_llama import TinyTarget
from typer.testing import CliRunner, Result

from draftloop.cli.main import app
from draftloop.core.manifest import MANIFEST_FILE
from draftloop.drafters.checkpoint import load_any
from draftloop.sglang.load.settings import LOAD_ENV, LoadSettings
from draftloop.sglang.tap import TAP_ENV, TapSettings


def draftloop(target: TinyTarget, *arguments: str) -> Result:
    sizes = ("drafter.draft_vocab_size=64", "target.context_length=512", "server.device=cpu")
    settings = [f"target.path={target.folder}", *sizes]
    return CliRunner().invoke(app, [*arguments, *(word for setting in settings for word in ("--set", setting))])


def published(target: TinyTarget, own: Path, folder: Path) -> Path:
    """The drafter in `own` as its authors would publish it: no manifest."""
    drafter, _ = load_any(own)
    config = json.loads((target.folder / "config.json").read_text())
    theirs = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 64, "num_hidden_layers": 1}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | theirs))
    tensors = {name: tensor.contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_published_drafter_gets_a_manifest_and_serves(target: TinyTarget, tmp_path: Path) -> None:
    assert draftloop(target, "new-drafter", str(tmp_path / "own")).exit_code == 0
    theirs = published(target, tmp_path / "own", tmp_path / "theirs")
    done = draftloop(target, "new-drafter", str(tmp_path / "first"), "--published", str(theirs))
    assert done.exit_code == 0, done.output
    (own, _), (first, manifest) = load_any(tmp_path / "own"), load_any(tmp_path / "first")
    assert manifest.version == "first"
    assert all(torch.equal(tensor, first.state_dict()[name]) for name, tensor in own.state_dict().items())

    line = draftloop(target, "server-command", "--drafter", str(tmp_path / "first"), "--reports", str(tmp_path))
    program, *words = shlex.split(line.output)
    environment = dict(word.split("=", 1) for word in words[: next(i for i, w in enumerate(words) if "=" not in w)])
    assert program == "env"
    assert TapSettings.model_validate_json(environment[TAP_ENV]).ring is None, "each start makes a ring of its own"
    assert LoadSettings.model_validate_json(environment[LOAD_ENV]).folder.parent == tmp_path
    assert words[words.index("--speculative-draft-model-path") + 1] == str(tmp_path / "first")
    assert words[words.index("--weight-version") + 1] == "first"


def test_one_line_errors(target: TinyTarget, tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        done = draftloop(target, *arguments)
        assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.output
        return done.stderr

    (tmp_path / "none").mkdir()
    assert "has no config.json" in refused("new-drafter", str(tmp_path / "a"), "--published", str(tmp_path / "none"))
    assert not (tmp_path / "a").exists()
    assert draftloop(target, "new-drafter", str(tmp_path / "b")).exit_code == 0
    assert "exists already" in refused("new-drafter", str(tmp_path / "b"))
    theirs = published(target, tmp_path / "b", tmp_path / "theirs")
    assert f"has no {MANIFEST_FILE}" in refused("server-command", "--drafter", str(theirs))
