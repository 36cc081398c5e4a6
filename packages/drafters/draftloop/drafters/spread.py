"""How a drafter in training lies over processes. Here: whole, in one; `sharding` has the other way.

They are apart because torch's FSDP takes seconds to import, a third of all that a process of a fleet imports.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Spread:
    """One process that holds everything."""

    def accumulate(self, backward: Callable[[], None]) -> None:
        """Run `backward`, which adds to the gradients of plain weights as often as it likes; then sum them over all
        processes, each of which must call."""
        backward()

    def whole(self, tensor: Tensor) -> Tensor:
        """All rows of a weight, an average or a moment; every process must ask."""
        return tensor

    def own_rows(self, tensor: Tensor) -> Tensor:
        """Those that this process holds, in place."""
        return tensor

    def laid_like(self, full: Tensor, like: Tensor) -> Tensor:
        """A tensor that every process holds whole, as `like` lies: of a sharded one, each keeps its own rows."""
        return full
