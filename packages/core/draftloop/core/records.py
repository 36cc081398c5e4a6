"""The capture record: what one span of one request taught us about the target.

    position      start        start+1      ...  start+T-1
    token_ids     x[0]         x[1]              x[T-1]
    fused         f[0]         f[1]              f[T-1]      states of the layers the drafter reads
    last_hidden   h[0]         h[1]              h[T-1]      h[t] @ lm_head.T = logits of the token after x[t]

Row t of the states belongs to token t: it was computed with x[t] as input. A span never has a hole; a
missing prefix (radix cache hit) shows as `start > 0`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

DEFAULT_LABEL = "default"


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """One verification of one draft tree.

    position: absolute position of the tree's root, the last token known before this step.
    draft_tokens: [N-1] int32, drafted nodes in tree order (the root is not a draft).
    parents: [N-1] int32, tree index of each node's parent (0 = root, i = draft_tokens[i-1]).
    accepted: number of drafted tokens accepted; accepted + 1 tokens were emitted.
    drafter_version: the drafter that drew the tree.
    """

    position: int
    draft_tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    accepted: int
    drafter_version: str


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """A contiguous span of one request with the target's states. See the module's drawing.

    token_ids: [T] int32.  fused: [T, K*H] float.  last_hidden: [T, H] float (after the final norm).
    prompt_len: tokens of the whole prompt; positions >= prompt_len - 1 predict generated tokens.
    domain, tenant: the request's labels: the kind of text, and whose it is.
    """

    request_id: str
    domain: str
    start: int
    prompt_len: int
    token_ids: NDArray[np.int32]
    fused: NDArray[np.floating]
    last_hidden: NDArray[np.floating]
    verify_steps: tuple[VerifyStep, ...] = field(default=())
    tenant: str = DEFAULT_LABEL

    def __post_init__(self) -> None:
        rows = len(self.token_ids)
        if len(self.fused) != rows or len(self.last_hidden) != rows:
            raise ValueError(
                f"record {self.request_id}: {rows} tokens but {len(self.fused)} fused and "
                f"{len(self.last_hidden)} last hidden rows"
            )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        return int(self.token_ids.nbytes + self.fused.nbytes + self.last_hidden.nbytes)

    @property
    def drafter_version(self) -> str:
        """The newest drafter version that drafted for this span ('' when none did)."""
        return self.verify_steps[-1].drafter_version if self.verify_steps else ""
