"""Messages from the tap inside SGLang's scheduler process to the collector.

One frame, little-endian:

    magic "DLW1" | crc32 (u32) | meta length (u32) | meta (msgpack) | array bytes, one after the other
                                 `---------- the checksum covers from here on ----------'

`meta` is {"kind": ..., "fields": {...}, "arrays": [[dtype tag, [shape]], ...]}. bfloat16 has no numpy dtype, so
bfloat16 states travel as their uint16 bits; `widen` turns them into float32.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from draftloop.core.records import DEFAULT_LABEL, VerifyStep

States = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]

_MAGIC = b"DLW1"
_PREFIX = struct.Struct("<4sI")
_META_LEN = struct.Struct("<I")
_DTYPES: dict[str, np.dtype[Any]] = {
    "int32": np.dtype("<i4"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}
_TAGS = {dtype: tag for tag, dtype in _DTYPES.items()}
VERIFY_ARRAY_COUNT = 5
_STATE_DTYPES = frozenset(_DTYPES[tag] for tag in ("float32", "float16", "bfloat16"))


class DamagedMessageError(ValueError):
    """The bytes are not a whole, unharmed frame. The consumer counts it and goes on."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """T contiguous positions of one request, from `start`, whose states the target has just computed.

    token_ids: [T] int32.  fused: [T, K*H].  last_hidden: [T, H]; states are float32, float16, or bfloat16 bits in
    uint16.  verify: the verification that produced these rows, None for prefill and plain decoding.
    Raises ValueError when shapes or dtypes differ from this.
    """

    request_id: str
    domain: str
    start: int
    prompt_len: int
    token_ids: NDArray[np.int32]
    fused: States
    last_hidden: States
    verify: VerifyStep | None = None
    tenant: str = DEFAULT_LABEL

    def __post_init__(self) -> None:
        rows = len(self.token_ids)
        if rows == 0 or self.start < 0:
            raise ValueError(f"chunk of {self.request_id}: {rows} tokens from position {self.start}")
        if self.token_ids.shape != (rows,) or self.token_ids.dtype != _DTYPES["int32"]:
            raise ValueError(f"chunk of {self.request_id}: token_ids must be [T] int32")
        for name, states in (("fused", self.fused), ("last_hidden", self.last_hidden)):
            if states.ndim != 2 or len(states) != rows or states.dtype not in _STATE_DTYPES:
                raise ValueError(
                    f"chunk of {self.request_id}: {name} is {states.dtype} {list(states.shape)} for {rows} tokens"
                )

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + len(self.token_ids)

    @property
    def nbytes(self) -> int:
        return int(self.token_ids.nbytes + self.fused.nbytes + self.last_hidden.nbytes)


DROPPED = "dropped"
WITHDRAWN = "withdrawn"
DISCARDING = frozenset({DROPPED, WITHDRAWN})


@dataclass(frozen=True, slots=True)
class Finish:
    """The request ended. reason: "stop", "length", "abort", or why what came is to be discarded: DROPPED (the ring
    was full), WITHDRAWN (its tenant or domain opted out meanwhile)."""

    request_id: str
    reason: str


Message = Chunk | Finish


def encode(message: Message) -> list[bytes | memoryview]:
    """The frame of `message` in parts to be written one after the other; array parts are views, not copies."""
    if isinstance(message, Finish):
        return pack_frame("finish", {"request_id": message.request_id, "reason": message.reason}, ())
    fields: dict[str, Any] = {
        "request_id": message.request_id,
        "domain": message.domain,
        "tenant": message.tenant,
        "start": message.start,
        "prompt_len": message.prompt_len,
        "verify": None,
    }
    arrays: list[NDArray[Any]] = [message.token_ids, message.fused, message.last_hidden]
    if message.verify is not None:
        fields["verify"], verify_arrays = split_verify(message.verify)
        arrays += verify_arrays
    return pack_frame("chunk", fields, arrays)


def decode(data: bytes | memoryview) -> Message:
    """Read one frame; arrays are read-only views on `data`. Raises DamagedMessageError."""
    kind, fields, arrays = unpack_frame(data)
    try:
        if kind == "finish":
            return Finish(fields["request_id"], fields["reason"])
        if kind == "chunk":
            verify = fields.pop("verify")
            step = None if verify is None else join_verify(verify, arrays[3:])
            return Chunk(**fields, token_ids=arrays[0], fused=arrays[1], last_hidden=arrays[2], verify=step)
    except (KeyError, IndexError, TypeError, ValueError) as err:
        raise DamagedMessageError(f"malformed {kind} message: {err}") from None
    raise DamagedMessageError(f"unknown message kind {kind!r}")


def split_verify(step: VerifyStep) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """A verification step as plain fields and its VERIFY_ARRAY_COUNT arrays."""
    fields = {"position": step.position, "accepted": step.accepted, "drafter_version": step.drafter_version}
    return fields, [step.draft_tokens, step.parents, step.rejected, step.target_ids, step.target_logits]


def join_verify(fields: dict[str, Any], arrays: Sequence[NDArray[Any]]) -> VerifyStep:
    """The inverse of `split_verify`. Raises ValueError for another number of arrays."""
    draft_tokens, parents, rejected, target_ids, target_logits = arrays
    return VerifyStep(
        draft_tokens=draft_tokens,
        parents=parents,
        rejected=rejected,
        target_ids=target_ids,
        target_logits=target_logits,
        **fields,
    )


def pack_frame(kind: str, fields: dict[str, Any], arrays: Sequence[NDArray[Any]]) -> list[bytes | memoryview]:
    """A frame of any kind, in parts. Raises ValueError for a dtype outside the wire's four."""
    body: list[bytes | memoryview] = []
    layout: list[tuple[str, tuple[int, ...]]] = []
    for array in arrays:
        tag = _TAGS.get(array.dtype)
        if tag is None:
            raise ValueError(f"{array.dtype} arrays do not travel: use one of {', '.join(_DTYPES)}")
        layout.append((tag, array.shape))
        body.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    meta = msgpack.packb({"kind": kind, "fields": fields, "arrays": layout})
    head = _META_LEN.pack(len(meta)) + meta
    crc = zlib.crc32(head)
    for part in body:
        crc = zlib.crc32(part, crc)
    return [_PREFIX.pack(_MAGIC, crc) + head, *body]


def unpack_frame(data: bytes | memoryview) -> tuple[str, dict[str, Any], list[NDArray[Any]]]:
    """(kind, fields, arrays) of a frame; arrays are read-only views on `data`. Raises DamagedMessageError."""
    view = memoryview(data).toreadonly()
    meta_at = _PREFIX.size + _META_LEN.size
    if len(view) < meta_at:
        raise DamagedMessageError(f"message of {len(view)} bytes is shorter than its header")
    magic, crc = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise DamagedMessageError(f"message starts with {magic!r}, not {_MAGIC!r}")
    if zlib.crc32(view[_PREFIX.size :]) != crc:
        raise DamagedMessageError("checksum mismatch")
    (meta_len,) = _META_LEN.unpack_from(view, _PREFIX.size)
    try:
        meta = msgpack.unpackb(view[meta_at : meta_at + meta_len])
        arrays = _unpack_arrays(view[meta_at + meta_len :], meta["arrays"])
        return meta["kind"], meta["fields"], arrays
    except (msgpack.UnpackException, KeyError, TypeError, ValueError) as err:
        raise DamagedMessageError(f"malformed message: {err}") from None


def _unpack_arrays(body: memoryview, layout: Sequence[tuple[str, Sequence[int]]]) -> list[NDArray[Any]]:
    arrays: list[NDArray[Any]] = []
    offset = 0
    for tag, shape in layout:
        count = math.prod(shape)
        arrays.append(np.frombuffer(body, _DTYPES[tag], count, offset).reshape(shape) if count else _empty(tag, shape))
        offset += count * _DTYPES[tag].itemsize
    if offset != len(body):
        raise ValueError(f"arrays take {offset} bytes, the message holds {len(body)}")
    return arrays


def _empty(tag: str, shape: Sequence[int]) -> NDArray[Any]:
    return np.empty(tuple(shape), _DTYPES[tag])


def widen(states: NDArray[Any]) -> NDArray[np.floating]:
    """States as numpy floats: uint16 bfloat16 bits become float32, floats pass unchanged."""
    if states.dtype != _DTYPES["bfloat16"]:
        return states
    return (states.astype(np.uint32) << 16).view(np.float32)
