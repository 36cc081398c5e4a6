"""The wire format: what is sent is what arrives, and damage is noticed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.capture.wire import Chunk, DamagedMessageError, Finish, States, decode, encode, widen
from draftloop.core.records import VerifyStep


def make_chunk(dtype: str = "float32", rows: int = 3) -> Chunk:
    rng = np.random.default_rng(0)
    fused: States = (rng.random((rows, 12)) * 100).astype(dtype)
    last_hidden: States = (rng.random((rows, 4)) * 100).astype(dtype)
    step = VerifyStep(
        position=7,
        draft_tokens=np.arange(5, dtype=np.int32),
        parents=np.zeros(5, np.int32),
        accepted=2,
        drafter_version="v3",
        rejected=np.array([3, 4], np.int32),
        target_ids=np.array([9, 1, 8], np.int32),
        target_logits=np.array([2.5, 1.5, -np.inf], np.float32),
    )
    return Chunk("chat--1", "chat", 7, 8, np.arange(rows, dtype=np.int32), fused, last_hidden, step, "acme")


def join(message: Chunk | Finish) -> bytes:
    return b"".join(encode(message))


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
def test_chunk_round_trip(dtype: str) -> None:
    sent = make_chunk(dtype)
    got = decode(join(sent))
    assert isinstance(got, Chunk)
    assert (got.request_id, got.domain, got.tenant, got.start, got.prompt_len) == ("chat--1", "chat", "acme", 7, 8)
    for mine, theirs in (
        (sent.token_ids, got.token_ids),
        (sent.fused, got.fused),
        (sent.last_hidden, got.last_hidden),
    ):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert got.verify is not None
    assert sent.verify is not None
    assert (got.verify.position, got.verify.accepted, got.verify.drafter_version) == (7, 2, "v3")
    for name in ("draft_tokens", "parents", "rejected", "target_ids", "target_logits"):
        mine, theirs = getattr(sent.verify, name), getattr(got.verify, name)
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


def test_finish_and_chunk_without_draft_round_trip() -> None:
    assert decode(join(Finish("chat--é", "stop"))) == Finish("chat--é", "stop")
    plain = Chunk("r", "d", 0, 1, np.zeros(1, np.int32), np.zeros((1, 2), np.float32), np.zeros((1, 2), np.float32))
    got = decode(join(plain))
    assert isinstance(got, Chunk)
    assert got.verify is None


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_damage_is_noticed(data: st.DataObject) -> None:
    whole = join(make_chunk(rows=1))
    if data.draw(st.booleans()):
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        at = data.draw(st.integers(0, len(whole) - 1))
        flipped = whole[at] ^ (1 << data.draw(st.integers(0, 7)))
        damaged = whole[:at] + bytes([flipped]) + whole[at + 1 :]
    with pytest.raises(DamagedMessageError):
        decode(damaged)


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(DamagedMessageError):
        decode(noise)


def test_wrong_shapes_and_dtypes_are_refused_when_made() -> None:
    tokens = np.zeros(2, np.int32)
    states = np.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match="fused is float32 \\[3, 4\\] for 2 tokens"):
        Chunk("r", "d", 0, 1, tokens, np.zeros((3, 4), np.float32), states)
    with pytest.raises(ValueError, match="token_ids"):
        Chunk("r", "d", 0, 1, tokens.astype(np.int64), states, states)
    with pytest.raises(ValueError, match="float64"):
        Chunk("r", "d", 0, 1, tokens, states, states.astype(np.float64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 tokens"):
        Chunk("r", "d", 0, 1, tokens[:0], states[:0], states[:0])


def test_bfloat16_bits_widen_exactly() -> None:
    exact = np.array([[1.0, -2.5, 0.15625, 3e38]], np.float32)
    bits = (exact.view(np.uint32) >> 16).astype(np.uint16)
    truncated = (exact.view(np.uint32) & 0xFFFF0000).view(np.float32)
    np.testing.assert_array_equal(widen(bits), truncated)
    assert widen(exact) is exact
