"""`draftloop new-drafter`, and the drafter a fleet begins with: untrained, or one that others have published."""

from __future__ import annotations

import shutil
from pathlib import Path

from draftloop.core.config import Config
from draftloop.core.manifest import Manifest
from draftloop.drafters.checkpoint import save_drafter
from draftloop.drafters.public import load_public
from draftloop.drafters.target import load_target_weights, read_target_config, target_identity
from draftloop.generator.prompts import chat_tokens, load_prompts
from draftloop.trainer.day0 import make_untrained


def untrained(config: Config, target: Path, folder: Path) -> Manifest:
    """Write an untrained drafter to `folder`, named after it; the traffic's prompts decide its draft vocabulary."""
    tokenize = chat_tokens(target)
    streams = (tokenize(prompt.messages) for prompt in load_prompts(config.traffic.prompts))
    return make_untrained(target, config.drafter, streams, folder, folder.name, config.seed)


def first_of_run(config: Config, target: Path, folder: Path) -> Manifest:
    """`untrained`, over one that was half written before a crash."""
    shutil.rmtree(folder, ignore_errors=True)
    return untrained(config, target, folder)


def from_published(published: Path, target: Path, folder: Path) -> Manifest:
    """Give a published drafter of this target a manifest and save it in `folder`, named after it.

    Raises CheckpointError when it is not one, or one that cannot be served or trained.
    """
    drafter = load_public(published, read_target_config(target), load_target_weights(target).embedding)
    identity = target_identity(target)
    return save_drafter(folder, drafter.shape, drafter.state_dict(), version=folder.name, parent=None, target=identity)
