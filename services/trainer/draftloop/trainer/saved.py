"""A trainer's state on disk: one that ended, or was killed, goes on from it as if nothing had happened.

One safetensors file in the run's folder: weights, averages, AdamW's moments and random states as tensors, the rest as
JSON in its header. It is written beside and renamed, so a reader finds the old state or the new one. What the records
are, and which of them were trained on, is in the journal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftloop.core.errors import CheckpointError
from draftloop.core.manifest import Lineage

TRAINING_FILE = "training.safetensors"


class Facts(BaseModel):
    """drafters: hashes of the weights beside which training may go on: the drafter in service, and the last candidate.
    lineage: of the drafter in training.  taught: hashes of the subjects it learnt from.  used: ids of the records that
    the lineage counts.  draws: what decides the replay buffer's draws."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[2] = 2
    drafters: tuple[str, ...]
    lineage: Lineage
    taught: tuple[int, ...]
    used: tuple[int, ...]
    draws: dict[str, Any]


@dataclass(frozen=True)
class SavedTraining:
    """tensors: see `OnlineTrainer.state_dict`."""

    tensors: Mapping[str, Tensor]
    facts: Facts

    def save(self, folder: Path) -> None:
        """Replace what `folder` holds; on disk when this returns. Raises CheckpointError in one line."""
        path = folder / TRAINING_FILE
        partial = path.with_name(f"{path.name}.partial")
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        try:
            save_file(tensors, partial, metadata={"facts": self.facts.model_dump_json()})
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        except (OSError, SafetensorError) as err:
            raise CheckpointError(f"cannot write {path}: {err}; free some space or look at its folder") from None

    @classmethod
    def load(cls, folder: Path) -> SavedTraining | None:
        """What `folder` holds, None when that is nothing. Raises CheckpointError when it cannot be read."""
        path = folder / TRAINING_FILE
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                facts = Facts.model_validate_json((file.metadata() or {}).get("facts", ""))
                return cls({name: file.get_tensor(name) for name in file.keys()}, facts)  # noqa: SIM118
        except (OSError, SafetensorError, ValidationError) as err:
            raise CheckpointError(f"{path} cannot be read ({' '.join(str(err).split())[:120]})") from None


def forget_training(folder: Path) -> None:
    """Take the saved state off the disk."""
    (folder / TRAINING_FILE).unlink(missing_ok=True)
