"""The tap: streams what the target computes, from inside SGLang's scheduler, to the trainer's side.

    scheduler process                                    | collector process
    target forward -> hooks (hooks.py) -> Tap            |
                        |  device -> host, in order      |
                        v                                |
                     TapWriter -> shared-memory ring  ---+-> RingReader -> Assembler -> CaptureRecord

Serving never waits: on a CPU the rows are copied straight into the ring; on a GPU they are cloned on the stream,
copied to pinned memory asynchronously, and a thread writes them when the copy's event has passed.
"""

from __future__ import annotations

import os
import queue
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from draftloop.capture.ring import RingOwner, RingWriter
from draftloop.capture.tap_writer import TapWriter
from draftloop.capture.wire import Chunk
from draftloop.core.records import VerifyStep

TAP_ENV = "DRAFTLOOP_TAP"
DOMAIN_SEPARATOR = "--"
DEFAULT_DOMAIN = "default"
MOST_PENDING_COPIES = 64


class TapSettings(BaseModel):
    """What a server process is told about its tap, as JSON in the environment variable DRAFTLOOP_TAP.

    ring_mib: the server makes the ring itself, of this size, for a refresher that attaches later; None: it is there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    ring: str
    ring_mib: int | None = Field(None, ge=1)
    algorithm: Literal["EAGLE3", "DFLASH"] = "EAGLE3"
    sample_rate: float = Field(1.0, ge=0.0, le=1.0)
    skip_domains: tuple[str, ...] = Field((), description="domains (tenants) that are never captured")

    @classmethod
    def from_environment(cls) -> TapSettings | None:
        raw = os.environ.get(TAP_ENV)
        return cls.model_validate_json(raw) if raw else None


def domain_of(request_id: str) -> str:
    """The domain label of a request id `{domain}--{unique}`; 'default' for any other id."""
    domain, separator, _ = request_id.partition(DOMAIN_SEPARATOR)
    return domain if separator and domain else DEFAULT_DOMAIN


def is_captured(request_id: str, settings: TapSettings) -> bool:
    """Whether this request is captured: a stable choice, so that all its chunks share one fate.

    The id is salted: the replay buffer also chooses by its hash, and the two choices must not go together.
    """
    if domain_of(request_id) in settings.skip_domains:
        return False
    return zlib.crc32(f"tap:{request_id}".encode()) < settings.sample_rate * 2**32


@dataclass(frozen=True, slots=True)
class RequestRows:
    """Where one request's rows lie in a batch, known on the host without a device sync."""

    request_id: str
    prompt_len: int
    start: int
    rows: slice


@dataclass(frozen=True, slots=True)
class VerifiedTrees:
    """B verified trees of N nodes, as tensors on the serving device. Node 0 is the root, the last known token.

    tokens: [B, N].  fused: [B*N, K*H], the accepted path at the front of each request's block.  accept_index:
    [B, depth + 1], global node index of each accepted node, root first.  accept_lens: [B], accepted drafts plus one.
    next_token, next_sibling: [B, N], first child and next sibling of each node, -1 for none.
    """

    tokens: torch.Tensor
    fused: torch.Tensor
    accept_index: torch.Tensor
    accept_lens: torch.Tensor
    next_token: torch.Tensor
    next_sibling: torch.Tensor

    @classmethod
    def of_chains(cls, tokens: torch.Tensor, fused: torch.Tensor, accept_lens: torch.Tensor) -> VerifiedTrees:
        """Trees without a fork: node i + 1 is the only child of node i."""
        count, nodes = tokens.shape
        index = torch.arange(count * nodes, device=tokens.device).view(count, nodes)
        step = torch.arange(1, nodes + 1, device=tokens.device)
        next_token = torch.where(step < nodes, step, -1).expand(count, nodes)
        return cls(tokens, fused, index, accept_lens, next_token, torch.full_like(next_token, -1))


class Tap:
    """Turns target forwards into chunks. One lives in each scheduler process; its methods are called by hooks."""

    def __init__(self, settings: TapSettings) -> None:
        self._settings = settings
        self._ring = None if settings.ring_mib is None else RingOwner.create(settings.ring, settings.ring_mib << 20)
        self._writer = TapWriter(RingWriter.attach(settings.ring))
        self._last_hidden: torch.Tensor | None = None
        self._graph_hidden: dict[int, torch.Tensor] = {}
        self._copier: HostCopier | None = None

    def see_last_hidden(self, hidden: torch.Tensor) -> None:
        """The target's final normed states of a forward, [N, H].

        Python does not run inside a replayed CUDA graph. While a graph is recorded, a copy into a lasting buffer of
        its size is recorded with it, so that each replay leaves its rows there.
        """
        if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
            rows = hidden.shape[0]
            if rows not in self._graph_hidden:
                self._graph_hidden[rows] = torch.empty_like(hidden)
            self._graph_hidden[rows].copy_(hidden)
        else:
            self._last_hidden = hidden

    def _take_last_hidden(self, rows: int) -> torch.Tensor | None:
        eager, self._last_hidden = self._last_hidden, None
        if eager is not None and eager.shape[0] >= rows:
            return eager[:rows]
        # A batch replays the smallest graph that holds it.
        held = min((size for size in self._graph_hidden if size >= rows), default=None)
        return None if held is None else self._graph_hidden[held][:rows]

    def prefill(self, batch: Any, fused: torch.Tensor) -> None:
        """A prefill (or a chunk of one): fused [N, K*H] rows of all requests, one after the other.

        batch: SGLang's ScheduleBatch, before the drafter shifts its input_ids. Requests whose prefix was cached
        start behind it.
        """
        spans, first = [], 0
        for req, length, start in zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True):
            if length and is_captured(req.rid, self._settings):
                rows = slice(first, first + length)
                spans.append(RequestRows(req.rid, len(req.origin_input_ids), start, rows))
            first += length
        last_hidden = self._take_last_hidden(first)
        if spans and last_hidden is not None:
            tensors = (batch.input_ids[:first], fused[:first], last_hidden)
            self._to_host(tensors, lambda host: self._emit_prefill(spans, host))

    def _emit_prefill(self, spans: list[RequestRows], host: list[NDArray[Any]]) -> None:
        token_ids, fused, last_hidden = host
        for span in spans:
            self._offer(span, token_ids[span.rows], fused[span.rows], last_hidden[span.rows], None)

    def verify(self, batch: Any, verified: VerifiedTrees, version: str) -> None:
        """A verification step of all requests of SGLang's ScheduleBatch; keeps each one's accepted path."""
        count, nodes = verified.tokens.shape
        last_hidden = self._take_last_hidden(count * nodes)
        wanted = [(i, req) for i, req in enumerate(batch.reqs) if is_captured(req.rid, self._settings)]
        if last_hidden is None or not wanted:
            return
        tensors = (
            verified.tokens,
            verified.fused.view(count, nodes, -1),
            last_hidden,
            verified.accept_index,
            verified.accept_lens,
            batch.seq_lens,
            verified.next_token,
            verified.next_sibling,
        )
        requests = [(i, req.rid, len(req.origin_input_ids)) for i, req in wanted]
        self._to_host(tensors, lambda host: self._emit_verify(requests, host, version))

    def _emit_verify(self, requests: list[tuple[int, str, int]], host: list[NDArray[Any]], version: str) -> None:
        tokens, fused, last_hidden, accept_index, accept_lens, seq_lens, next_token, next_sibling = host
        nodes = tokens.shape[1]
        for i, request_id, prompt_len in requests:
            length = int(accept_lens[i])
            path = accept_index[i, :length]
            start = int(seq_lens[i])
            step = VerifyStep(
                position=start,
                draft_tokens=tokens[i, 1:].astype(np.int32),
                parents=tree_parents(next_token[i], next_sibling[i])[1:],
                accepted=length - 1,
                drafter_version=version,
            )
            span = RequestRows(request_id, prompt_len, start, slice(0, length))
            self._offer(span, tokens[i][path - i * nodes], fused[i, :length], last_hidden[path], step)

    def _offer(
        self,
        span: RequestRows,
        token_ids: NDArray[Any],
        fused: NDArray[Any],
        last_hidden: NDArray[Any],
        step: VerifyStep | None,
    ) -> None:
        self._writer.offer(
            Chunk(
                request_id=span.request_id,
                domain=domain_of(span.request_id),
                start=span.start,
                prompt_len=span.prompt_len,
                token_ids=token_ids.astype(np.int32),
                fused=fused,
                last_hidden=last_hidden,
                verify=step,
            )
        )

    def finish(self, request_id: str, reason: str) -> None:
        """The request left the scheduler for good (a retracted one comes back and is not finished)."""
        if not is_captured(request_id, self._settings):
            return
        if self._copier is None:
            self._writer.finish(request_id, reason)
        else:
            self._copier.submit((), lambda _: self._writer.finish(request_id, reason))

    def _to_host(self, tensors: tuple[torch.Tensor, ...], emit: Callable[[list[NDArray[Any]]], None]) -> None:
        if tensors[0].device.type == "cpu":
            emit([as_numpy(tensor) for tensor in tensors])
            return
        if self._copier is None:
            self._copier = HostCopier()
        self._copier.submit(tensors, emit)


def as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """A host tensor as numpy; bfloat16, which numpy lacks, as its uint16 bits (see capture.wire)."""
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().contiguous().view(torch.int16).numpy().view(np.uint16)
    return tensor.detach().numpy()


def tree_parents(next_token: NDArray[Any], next_sibling: NDArray[Any]) -> NDArray[np.int32]:
    """[N] parent of each node from SGLang's linked lists (first child, next sibling; -1 ends them). Root: 0.

    root 0 with children 1, 3 and 2 below 1:  next_token [1, 2, -1, -1], next_sibling [-1, 3, -1, -1] -> [0, 0, 1, 0]
    """
    parents = np.zeros(len(next_token), dtype=np.int32)
    child_of, sibling_of = next_token.tolist(), next_sibling.tolist()
    for node, child in enumerate(child_of):
        while child != -1:
            parents[child] = node
            child = sibling_of[child]
    return parents


class HostCopier:
    """Brings device tensors to the host off the serving path, first in, first out.

    When MOST_PENDING_COPIES are under way the next one is dropped: the assembler ends the request's span at the
    hole, so nothing is ever misaligned.
    """

    def __init__(self) -> None:
        self._pending: queue.Queue[tuple[Any, list[torch.Tensor], Callable[[list[NDArray[Any]]], None]]]
        self._pending = queue.Queue(MOST_PENDING_COPIES)
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        threading.Thread(target=self._run, name="draftloop-tap", daemon=True).start()

    def submit(self, tensors: tuple[torch.Tensor, ...], emit: Callable[[list[NDArray[Any]]], None]) -> None:
        if self._pending.full():
            return
        # Decode graphs reuse one buffer: cloned on the compute stream before the next replay may overwrite it.
        clones = [tensor.clone() for tensor in tensors]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host = []
            for clone in clones:
                clone.record_stream(self._stream)
                pinned = torch.empty(clone.shape, dtype=clone.dtype, pin_memory=True)
                host.append(pinned.copy_(clone, non_blocking=True))
            done: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        self._pending.put_nowait((done, host, emit))

    def _run(self) -> None:
        while True:
            done, host, emit = self._pending.get()
            done.synchronize()
            emit([as_numpy(tensor) for tensor in host])
