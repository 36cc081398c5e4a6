"""The day-0 drafter: shaped for the target, untrained, with a draft vocabulary chosen before any traffic."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from draftloop.core.config import DrafterConfig
from draftloop.core.manifest import Manifest
from draftloop.drafters.checkpoint import save_drafter
from draftloop.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftloop.drafters.target import load_target_weights, read_target_config, target_identity
from draftloop.drafters.vocab import build_draft_vocab, count_tokens


def make_untrained(
    target: Path, config: DrafterConfig, prompt_tokens: Iterable[Iterable[int]], folder: Path, version: str, seed: int
) -> Manifest:
    """Write an untrained drafter for the checkpoint in `target` to the new folder `folder`.

    prompt_tokens: token ids of prompts of the expected kind; their tokens come first in the draft vocabulary, the
    tokenizer's own order (frequent merges have low ids) fills the rest.
    """
    shape = read_target_config(target)
    weights = load_target_weights(target)
    size = min(config.draft_vocab_size, int(shape["vocab_size"]))
    drafter_config = Eagle3Config.for_target(shape, size, config.layer_ids, config.intermediate_size)
    counts = count_tokens(prompt_tokens, drafter_config.vocab_size)
    end_ids = shape.get("eos_token_id") or []
    always = [end_ids] if isinstance(end_ids, int) else end_ids
    draft_ids = build_draft_vocab(counts, size, always)
    with torch.no_grad():
        drafter = Eagle3Drafter.untrained(
            drafter_config, draft_ids, weights.lm_head, weights.norm, seed, last_layer=weights.last_layer
        )
    return save_drafter(
        folder, drafter_config, drafter.state_dict(), version=version, parent=None, target=target_identity(target)
    )
