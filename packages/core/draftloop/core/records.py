"""The capture record: what one span of one request taught us about the target.

    position      start        start+1      ...  start+T-1
    token_ids     x[0]         x[1]              x[T-1]
    fused         f[0]         f[1]              f[T-1]      states of the layers the drafter reads
    last_hidden   h[0]         h[1]              h[T-1]      h[t] @ lm_head.T = logits of the token after x[t]

Row t of the states belongs to token t: it was computed with x[t] as input. A span never has a hole; a
missing prefix (radix cache hit) shows as `start > 0`.

A verification step stopped at row `position + accepted`: every drafted token that continued it was refused there.

    root x[P], tree  P -> a -> b, P -> c     accepted 1: a is x[P+1]; rejected [b]; target_logits are row P+1's
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

DEFAULT_LABEL = "default"


def _no_tokens() -> NDArray[np.int32]:
    return np.empty(0, np.int32)


def _no_logits() -> NDArray[np.float32]:
    return np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """One verification of one draft tree.

    position: absolute position of the tree's root, the last token known before this step.
    draft_tokens: [N-1] int32, drafted nodes in tree order (the root is not a draft).
    parents: [N-1] int32, tree index of each node's parent (0 = root, i = draft_tokens[i-1]).
    accepted: number of drafted tokens accepted; accepted + 1 tokens were emitted.
    drafter_version: the drafter that drew the tree.
    rejected: [R] int32, the drafted tokens refused where the step stopped; empty when it stopped at a leaf.
    target_ids, target_logits: [k] int32 and float32, the target's k best next tokens there, best first, after
    penalties and grammar and before temperature; k is `capture.top_logits`.
    """

    position: int
    draft_tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    accepted: int
    drafter_version: str
    rejected: NDArray[np.int32] = field(default_factory=_no_tokens)
    target_ids: NDArray[np.int32] = field(default_factory=_no_tokens)
    target_logits: NDArray[np.float32] = field(default_factory=_no_logits)


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
