"""The tap: streams what the target computes, from inside SGLang's scheduler, to the trainer's side.

    scheduler process                                    | collector process
    target forward -> hooks (hooks.py) -> Tap            |
                        |  device -> host, in order      |
                        v                                |
                     TapWriter -> shared-memory ring  ---+-> RingReader -> Assembler -> CaptureRecord

Serving never waits: on a CPU the rows are copied straight into the ring; on a GPU `HostCopier` brings them over. What
finds no room costs its request the whole record, and is counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftloop.capture.admission import Admission, Labels, Verdict
from draftloop.capture.ring import RingOwner, RingWriter, new_ring_name
from draftloop.capture.tap_writer import TapWriter
from draftloop.capture.wire import Chunk
from draftloop.core.records import VerifyStep
from draftloop.sglang.algorithms import Algorithm
from draftloop.sglang.host_copier import Emit, HostCopier, as_numpy
from draftloop.sglang.labels import labels_of

TAP_ENV = "DRAFTLOOP_TAP"
# Divides the usual vocabularies: Llama 3 (128,256), Qwen 3 (151,936), SmolLM2 (49,152).
_BLOCK = 128


class TapSettings(BaseModel):
    """What a server process is told about its tap, as JSON in the environment variable DRAFTLOOP_TAP. Which requests
    are captured stands in the ring's control block, where it can be changed.

    ring: its name, when it is there already.  ring_mib: the server makes it, of this size, for a refresher that
    attaches later, and captures nothing until then.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    ring: str | None = None
    ring_mib: int | None = Field(None, ge=1)
    algorithm: Algorithm = "EAGLE3"
    top_logits: int = Field(8, ge=0)

    @model_validator(mode="after")
    def _one_of_two(self) -> TapSettings:
        if (self.ring is None) == (self.ring_mib is None):
            raise ValueError("name the ring that is there, or say how large one to make")
        return self

    @classmethod
    def from_environment(cls) -> TapSettings | None:
        raw = os.environ.get(TAP_ENV)
        return cls.model_validate_json(raw) if raw else None


@dataclass(frozen=True, slots=True)
class RequestRows:
    """Where one request's rows lie in a batch, known on the host without a device sync."""

    request_id: str
    labels: Labels
    prompt_len: int
    start: int
    rows: slice


@dataclass(frozen=True, slots=True)
class VerifiedTrees:
    """B verified trees of N nodes, as tensors on the serving device. Node 0 is the root, the last known token.

    tokens: [B, N].  fused: [B*N, K*H], the accepted path at the front of each request's block.  accept_index:
    [B, depth + 1], global node index of each accepted node, root first.  accept_lens: [B], accepted drafts plus one.
    next_token, next_sibling: [B, N], first child and next sibling of each node, -1 for none.
    logits: [B*N, V], the target's at each node; None where SGLang keeps only their shards' maxima.
    """

    tokens: torch.Tensor
    fused: torch.Tensor
    accept_index: torch.Tensor
    accept_lens: torch.Tensor
    next_token: torch.Tensor
    next_sibling: torch.Tensor
    logits: torch.Tensor | None

    @classmethod
    def of_chains(
        cls, tokens: torch.Tensor, fused: torch.Tensor, accept_lens: torch.Tensor, logits: torch.Tensor | None
    ) -> VerifiedTrees:
        """Trees without a fork: node i + 1 is the only child of node i."""
        count, nodes = tokens.shape
        index = torch.arange(count * nodes, device=tokens.device).view(count, nodes)
        step = torch.arange(1, nodes + 1, device=tokens.device)
        next_token = torch.where(step < nodes, step, -1).expand(count, nodes)
        return cls(tokens, fused, index, accept_lens, next_token, torch.full_like(next_token, -1), logits)

    def best_where_stopped(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """([B, k] logits, [B, k] ids): the target's best tokens after each request's last accepted node."""
        if self.logits is None or k == 0:
            none = self.tokens.new_empty((len(self.tokens), 0))
            return none.float(), none
        last = (self.accept_lens - 1).long().unsqueeze(1)
        return best_tokens(self.logits[self.accept_index.gather(1, last).squeeze(1).long()], k)


def best_tokens(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([B, k] logits, [B, k] ids) of the k largest of [B, V], largest first.

    Only the k blocks with the largest maxima can hold them; looking at blocks first takes a CPU a third of
    `torch.topk`'s time.
    """
    count, vocab = logits.shape
    if vocab % _BLOCK or vocab // _BLOCK < k:
        best = logits.topk(min(k, vocab))
        return best.values, best.indices
    blocks = logits.view(count, vocab // _BLOCK, _BLOCK)
    chosen = blocks.amax(-1).topk(k).indices
    best = blocks.gather(1, chosen.unsqueeze(-1).expand(-1, -1, _BLOCK)).reshape(count, -1).topk(k)
    return best.values, chosen.gather(1, best.indices // _BLOCK) * _BLOCK + best.indices % _BLOCK


class Tap:
    """Turns target forwards into chunks. One lives in each scheduler process; its methods are called by hooks."""

    def __init__(self, settings: TapSettings) -> None:
        self._owner = None if settings.ring_mib is None else RingOwner.create(new_ring_name(), settings.ring_mib << 20)
        self._ring = RingWriter.attach(str(settings.ring) if self._owner is None else self._owner.name)
        self._writer = TapWriter(self._ring)
        self._admission = Admission(self._ring.control)
        self._top_logits = settings.top_logits
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
        self._take_over_policy()
        spans, first = [], 0
        for req, length, start in zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True):
            if length and (labels := self._admit(req)) is not None:
                rows = slice(first, first + length)
                spans.append(RequestRows(req.rid, labels, len(req.origin_input_ids), start, rows))
            first += length
        last_hidden = self._take_last_hidden(first)
        if spans and last_hidden is not None:
            tensors = (batch.input_ids[:first], fused[:first], last_hidden)
            self._to_host([span.request_id for span in spans], tensors, lambda host: self._emit_prefill(spans, host))

    def _admit(self, req: Any) -> Labels | None:
        """The request's labels if it is captured. Decided at its first prefill; when it is retracted and comes back,
        the decision stands."""
        if not self._admission.knows(req.rid):
            labels = labels_of(req.rid, req.sampling_params.custom_params)
            if self._admission.begin(req.rid, labels, self._writer.bytes_sent) is Verdict.THROTTLED:
                self._ring.count_throttled_record()
        return self._admission.labels(req.rid)

    def _take_over_policy(self) -> None:
        for request_id in self._admission.refresh(self._writer.bytes_sent):
            self._in_order(partial(self._writer.withdraw, request_id))

    def _emit_prefill(self, spans: list[RequestRows], host: list[NDArray[Any]]) -> None:
        token_ids, fused, last_hidden = host
        for span in spans:
            self._offer(span, token_ids[span.rows], fused[span.rows], last_hidden[span.rows], None)

    def verify(self, batch: Any, verified: VerifiedTrees, version: str) -> None:
        """A verification step of all requests of SGLang's ScheduleBatch; keeps each one's accepted path.

        A request that ended already is left out: with overlap on, SGLang computes one step too many of it.
        """
        self._take_over_policy()
        count, nodes = verified.tokens.shape
        last_hidden = self._take_last_hidden(count * nodes)
        wanted = [
            (i, req, labels)
            for i, req in enumerate(batch.reqs)
            if (labels := self._admission.labels(req.rid)) is not None
        ]
        if last_hidden is None or not wanted:
            return
        target_logits, target_ids = verified.best_where_stopped(self._top_logits)
        tensors = (
            verified.tokens,
            verified.fused.view(count, nodes, -1),
            last_hidden,
            verified.accept_index,
            verified.accept_lens,
            batch.seq_lens,
            verified.next_token,
            verified.next_sibling,
            target_ids,
            target_logits.float(),
        )
        requests = [(i, req.rid, labels, len(req.origin_input_ids)) for i, req, labels in wanted]
        request_ids = [request_id for _, request_id, _, _ in requests]
        self._to_host(request_ids, tensors, lambda host: self._emit_verify(requests, host, version))

    def _emit_verify(
        self, requests: list[tuple[int, str, Labels, int]], host: list[NDArray[Any]], version: str
    ) -> None:
        tokens, fused, last_hidden, accept_index, accept_lens, seq_lens, next_token, next_sibling, ids, logits = host
        nodes = tokens.shape[1]
        for i, request_id, labels, prompt_len in requests:
            length = int(accept_lens[i])
            path = accept_index[i, :length]
            start = int(seq_lens[i])
            drafted = tokens[i, 1:].astype(np.int32)
            parents = tree_parents(next_token[i], next_sibling[i])[1:]
            step = VerifyStep(
                position=start,
                draft_tokens=drafted,
                parents=parents,
                accepted=length - 1,
                drafter_version=version,
                rejected=drafted[parents == path[-1] - i * nodes],
                target_ids=ids[i].astype(np.int32),
                target_logits=logits[i],
            )
            span = RequestRows(request_id, labels, prompt_len, start, slice(0, length))
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
                domain=span.labels.domain,
                tenant=span.labels.tenant,
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
        if self._admission.end(request_id):
            self._in_order(partial(self._writer.finish, request_id, reason))

    def idle(self) -> None:
        """The scheduler has nothing to do: send the finishes that found the ring full."""
        if self._writer.has_unsent:
            self._in_order(self._writer.flush)

    def _in_order(self, action: Callable[[], None]) -> None:
        """Use the writer, behind the copies under way."""
        if self._copier is None:
            action()
        else:
            self._copier.call(action)

    def _to_host(self, request_ids: Sequence[str], tensors: tuple[torch.Tensor, ...], emit: Emit) -> None:
        if tensors[0].device.type == "cpu":
            emit([as_numpy(tensor) for tensor in tensors])
            return
        if self._copier is None:
            self._copier = HostCopier()
        if not self._copier.submit(tensors, emit):
            for request_id in request_ids:
                self._in_order(partial(self._writer.drop, request_id))


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
