"""Capture records of known size and content."""

from __future__ import annotations

import numpy as np

from draftloop.core.records import CaptureRecord, VerifyStep

BYTES_PER_TOKEN = 4 + 8 + 4


def make_record(
    index: int, domain: str = "chat", tokens: int = 10, steps: int = 0, tenant: str = "default"
) -> CaptureRecord:
    """A record of `tokens` * BYTES_PER_TOKEN bytes whose request id is its index."""
    verify = tuple(VerifyStep(i, np.arange(3, dtype=np.int32), np.zeros(3, np.int32), i, f"v{i}") for i in range(steps))
    return CaptureRecord(
        request_id=str(index),
        domain=domain,
        start=index,
        prompt_len=2,
        token_ids=np.arange(tokens, dtype=np.int32),
        fused=np.full((tokens, 2), index, np.float32),
        last_hidden=np.full((tokens, 1), index, np.float32),
        verify_steps=verify,
        tenant=tenant,
    )
