"""Steps timed, and speculation that follows the load, inside SGLang's scheduler process."""

from __future__ import annotations

from draftloop.sglang.hooks import Hook
from draftloop.sglang.load.settings import LoadSettings


def load_hooks(settings: LoadSettings) -> tuple[Hook, ...]:
    """The hooks of a scheduler process that times its steps, and may follow its load. Imports SGLang."""
    from draftloop.sglang.load.dflash import DflashFollower
    from draftloop.sglang.load.eagle import EagleFollower
    from draftloop.sglang.load.fixed import FixedShape

    if not settings.follow:
        return FixedShape(settings).hooks()
    return DflashFollower(settings).hooks() if settings.algorithm == "DFLASH" else EagleFollower(settings).hooks()
