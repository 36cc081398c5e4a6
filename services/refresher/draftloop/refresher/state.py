"""What a controller must know after it was killed: how many workers, which drafter, how far a roll-out had come."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from draftloop.core.errors import ConfigError
from draftloop.refresher.rollout import Rollout

STATE_FILE = "state.json"


class FleetState(BaseModel):
    """router_port: clients know it; None before a router ran.  ray_address: of the cluster that outlives a controller,
    None when it is the controller's own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    workers: int
    rollout: Rollout
    router_port: int | None = None
    ray_address: str | None = None

    def save(self, folder: Path) -> None:
        """Replace the file at once: a reader finds the old state or the new one, also after a power cut."""
        path = folder / STATE_FILE
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(self.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    @classmethod
    def load(cls, folder: Path) -> FleetState | None:
        """The saved state, None when there is none. Raises ConfigError when it cannot be read."""
        path = folder / STATE_FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as err:
            raise ConfigError(f"{path} cannot be read ({' '.join(str(err).split())[:120]}): move it away") from None
