"""The day-0 drafter: shaped for the target, untrained, with a draft vocabulary chosen before any traffic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from draftloop.core.config import DrafterConfig
from draftloop.core.manifest import Manifest
from draftloop.drafters.checkpoint import save_drafter
from draftloop.drafters.dflash import DflashConfig, DflashDrafter
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.eagle1 import Eagle1Config, Eagle1Drafter
from draftloop.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftloop.drafters.target import TargetWeights, end_ids, load_target_weights, read_target_config, target_identity
from draftloop.drafters.vocab import build_draft_vocab, count_tokens


def make_untrained(
    target: Path, config: DrafterConfig, prompt_tokens: Iterable[Iterable[int]], folder: Path, version: str, seed: int
) -> Manifest:
    """Write an untrained drafter for the checkpoint in `target` to the new folder `folder`.

    prompt_tokens: token ids of prompts of the expected kind, which decide EAGLE-3's draft vocabulary.
    """
    shape = read_target_config(target)
    weights = load_target_weights(target)
    drafter: Drafter
    match config.kind:
        case "eagle1":
            drafter = Eagle1Drafter.untrained(Eagle1Config.for_target(shape, config.intermediate_size), seed)
        case "eagle3":
            drafter = _untrained_eagle3(shape, weights, config, prompt_tokens, seed)
        case "dflash":
            drafter = _untrained_dflash(shape, weights, config, seed)
    return save_drafter(
        folder, drafter.shape, drafter.state_dict(), version=version, parent=None, target=target_identity(target)
    )


def _untrained_eagle3(
    shape: Mapping[str, Any],
    weights: TargetWeights,
    config: DrafterConfig,
    prompt_tokens: Iterable[Iterable[int]],
    seed: int,
) -> Eagle3Drafter:
    """The prompts' tokens come first in the draft vocabulary; the tokenizer's own order (frequent merges have low
    ids) fills the rest."""
    size = min(config.draft_vocab_size, int(shape["vocab_size"]))
    drafter_config = Eagle3Config.for_target(shape, size, config.layer_ids, config.intermediate_size)
    counts = count_tokens(prompt_tokens, drafter_config.vocab_size)
    draft_ids = build_draft_vocab(counts, size, end_ids(shape))
    return Eagle3Drafter.untrained(
        drafter_config, draft_ids, weights.lm_head, weights.norm, seed, last_layer=weights.last_layer
    )


def _untrained_dflash(
    shape: Mapping[str, Any], weights: TargetWeights, config: DrafterConfig, seed: int
) -> DflashDrafter:
    """The last token id stands for an unknown slot: the rarest merge, if the tokenizer is ordered by frequency."""
    mask = int(shape["vocab_size"]) - 1
    drafter_config = DflashConfig.for_target(
        shape, mask, config.num_layers, config.block_size, config.layer_ids, config.intermediate_size
    )
    return DflashDrafter.untrained(drafter_config, weights.norm, seed)
