"""What a record says about the traffic, against a loop over its tokens and steps."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftloop.capture.observation import observe
from draftloop.core.records import CaptureRecord, VerifyStep


def step(position: int, drafts: int, accepted: int, version: str) -> VerifyStep:
    nodes = np.zeros(drafts, dtype=np.int32)
    return VerifyStep(position, nodes, nodes, min(accepted, drafts), version)


@given(
    st.integers(0, 20),
    st.integers(1, 30),
    st.lists(st.integers(0, 9), max_size=30),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.sampled_from(["v1", "v2"])), max_size=8),
    st.sets(st.integers(0, 9)),
)
def test_observe(
    start: int, prompt_len: int, tokens: list[int], steps: list[tuple[int, int, str]], known: set[int]
) -> None:
    record = CaptureRecord(
        request_id="chat--1",
        domain="chat",
        start=start,
        prompt_len=prompt_len,
        token_ids=np.array(tokens, dtype=np.int32),
        fused=np.zeros((len(tokens), 2), dtype=np.float32),
        last_hidden=np.zeros((len(tokens), 1), dtype=np.float32),
        verify_steps=tuple(step(i, *one) for i, one in enumerate(steps)),
    )
    spoken = np.array([token in known for token in range(10)])
    seen = observe(record, spoken)
    answer = [token for place, token in enumerate(tokens, start=start) if place >= prompt_len]
    newest = steps[-1][2] if steps else ""
    own = [min(accepted, drafts) for drafts, accepted, version in steps if version == newest and drafts > 0]
    assert (seen.domain, seen.drafter_version) == ("chat", newest)
    assert (seen.verify_steps, seen.emitted) == (len(own), sum(accepted + 1 for accepted in own))
    assert (seen.generated, seen.unspoken) == (len(answer), sum(token not in known for token in answer))
    assert observe(record, None).unspoken == 0
