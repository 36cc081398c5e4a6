"""A CPU server's start-up is nearly all imports: import one model's module, not every one, and in one process only."""

from __future__ import annotations

import importlib
import multiprocessing
import re
import sys
from pathlib import Path
from typing import Any

MODELS_PACKAGE = "sglang.srt.models"


def skip_gpu_packages() -> None:
    """Let `import flashinfer` fail, as on a machine without it: SGLang is ready for that, and it would cost 5 s."""
    sys.modules.setdefault("flashinfer", None)  # type: ignore[arg-type]


def fork_children(_result: None, *args: Any, **kwargs: Any) -> None:
    """Let scheduler and detokenizer be forked, with everything imported, where SGLang would start each from nothing.

    It asks for fresh processes because CUDA cannot be forked; without one, what matters is that no thread runs yet.
    """
    multiprocessing.set_start_method("fork", force=True)


def register_served_model(model_config: Any, *args: Any, **kwargs: Any) -> None:
    """Put the served architecture into SGLang's registry, whose look-up then skips its scan of every model file.

    Anything unusual is left to that scan.
    """
    from sglang.srt.models.registry import ModelRegistry

    for architecture in model_config.hf_config.architectures or ():
        if architecture not in ModelRegistry.models and (entry := find_entry_class(architecture)) is not None:
            ModelRegistry.models[architecture] = entry


def find_entry_class(architecture: str) -> type | None:
    """The class `architecture` if exactly one file of SGLang's models defines it as an entry class."""
    folder = Path(importlib.import_module(MODELS_PACKAGE).__path__[0])
    definition = re.compile(rf"^class {re.escape(architecture)}\b", re.MULTILINE)
    files = [file for file in folder.glob("*.py") if definition.search(file.read_text(encoding="utf-8"))]
    if len(files) != 1:
        return None
    module = importlib.import_module(f"{MODELS_PACKAGE}.{files[0].stem}")
    entries = module.EntryClass if isinstance(module.EntryClass, list) else [module.EntryClass]
    return next((entry for entry in entries if entry.__name__ == architecture), None)
