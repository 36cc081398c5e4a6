"""SGLang's name for the way each kind of drafter is served."""

from __future__ import annotations

from typing import Literal

from draftloop.core.manifest import DrafterKind

Algorithm = Literal["EAGLE", "EAGLE3", "DFLASH"]

# EAGLE-2 is an EAGLE-1 head drafted as another tree, the only one that SGLang draws.
ALGORITHMS: dict[DrafterKind, Algorithm] = {
    "eagle1": "EAGLE",
    "eagle2": "EAGLE",
    "eagle3": "EAGLE3",
    "dflash": "DFLASH",
}
