"""A plugin for the server of `test_parity.py`: every forward pass of SGLang's drafter, as a file.

SGLang finds it by the entry point that the test lays on the server's PYTHONPATH. It imports nothing of draftloop.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

FOLDER = "DRAFT_PROBE_FOLDER"
MODELS = ("sglang.srt.models.llama_eagle3.LlamaForCausalLMEagle3", "sglang.srt.models.dflash.DFlashDraftModel")


def load() -> None:
    """In the server's first process, from which the scheduler is forked on a CPU."""
    from safetensors.torch import save_file
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    folder, numbers = Path(os.environ[FOLDER]), itertools.count()

    def keep(result: Any, model: Any, input_ids: Any, positions: Any, *args: Any, **kwargs: Any) -> None:
        """logits: [rows, Vd], fewer than tokens where only the last one's are wanted.  states: [rows, H] of a drafter
        that borrows the target's head."""
        made = {"positions": positions}
        if input_ids is not None:
            made["input_ids"] = input_ids
        if getattr(result, "next_token_logits", None) is not None:
            made["logits"] = result.next_token_logits
        else:
            made["states"] = result if hasattr(result, "shape") else result.hidden_states
        name = f"{next(numbers):06}.safetensors"
        save_file({key: tensor.detach().clone().contiguous() for key, tensor in made.items()}, folder / f".{name}")
        (folder / f".{name}").rename(folder / name)

    for model in MODELS:
        HookRegistry.register(f"{model}.forward", keep, HookType.AFTER)
