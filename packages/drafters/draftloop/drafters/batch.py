"""Capture records -> one right-padded batch, a record a row, or packed: several records one after another in a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftloop.core.records import CaptureRecord
from draftloop.drafters.rejections import refused_drafts


@dataclass(frozen=True)
class Batch:
    """Padded spans; row t of every field belongs to token t of its line of records.

    token_ids: [B, T] int64.  fused: [B, T, K*H].  last_hidden: [B, T, H].  lengths: [B] int64, valid rows.
    generated: [B, T] bool, True where the row's target logits speak about a generated token (padding: False).
    starts, ends: [B, T] int64, the rows starts <= s < ends are the record that row t belongs to; no row sees another
    record's (padding: 0 and 0).
    replayed: [B, T] bool, rows of records that an earlier drafter has learned from.
    refused: [R, 4] int64, drafts serving refused: line b, position t, step j, target id (see `rejections`).

        token        p0   p1   p2 | a0   a1   <end>        prompt of 3, answer of 3
        generated     .    .    T    T    T    T           row 2 predicts a0
    """

    token_ids: Tensor
    fused: Tensor
    last_hidden: Tensor
    lengths: Tensor
    generated: Tensor
    starts: Tensor
    ends: Tensor
    replayed: Tensor
    refused: Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True)
class _Span:
    """The rows begin <= t < stop of a record."""

    record: CaptureRecord
    begin: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.begin


def nothing_replayed(record: CaptureRecord) -> bool:
    return False


def collate(
    records: Sequence[CaptureRecord],
    max_length: int,
    device: torch.device | str,
    generator: torch.Generator | None = None,
    *,
    packed: bool = False,
    replayed: Callable[[CaptureRecord], bool] = nothing_replayed,
) -> Batch:
    """Pad records to the longest line of them, in fp32.

    A record longer than `max_length` is cropped at a random place by `generator`, or to its end without one.
    packed: lay records one after another while they fit into `max_length`.
    """
    spans = [_crop(record, max_length, generator) for record in records]
    lines = _pack(spans, max_length) if packed else [[span] for span in spans]
    width = max(sum(span.size for span in line) for line in lines)
    first, shape = records[0], (len(lines), width)
    token_ids, starts, ends = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    fused = torch.zeros(*shape, first.fused.shape[1])
    last_hidden = torch.zeros(*shape, first.last_hidden.shape[1])
    generated, old = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    refused = [torch.zeros(0, 4, dtype=torch.int64)]
    for row, line in enumerate(lines):
        place = 0
        for span in line:
            record, rows, here = span.record, slice(span.begin, span.stop), slice(place, place + span.size)
            token_ids[row, here] = torch.from_numpy(record.token_ids[rows])
            fused[row, here] = torch.from_numpy(record.fused[rows])
            last_hidden[row, here] = torch.from_numpy(record.last_hidden[rows])
            positions = torch.arange(record.start + span.begin, record.start + span.stop)
            generated[row, here] = positions >= record.prompt_len - 1
            starts[row, here], ends[row, here] = place, place + span.size
            old[row, here] = replayed(record)
            refused.append(_refused(span, row, place))
            place += span.size
    lengths = torch.tensor([sum(span.size for span in line) for line in lines])
    tensors = (token_ids, fused, last_hidden, lengths, generated, starts, ends, old, torch.cat(refused))
    return Batch(*(tensor.to(device) for tensor in tensors))


def _crop(record: CaptureRecord, max_length: int, generator: torch.Generator | None) -> _Span:
    spare = record.num_tokens - max_length
    if spare <= 0:
        return _Span(record, 0, record.num_tokens)
    begin = spare if generator is None else int(torch.randint(spare + 1, (), generator=generator))
    return _Span(record, begin, begin + max_length)


def _pack(spans: Sequence[_Span], width: int) -> list[list[_Span]]:
    """First fit, longest first."""
    lines: list[list[_Span]] = []
    for span in sorted(spans, key=lambda span: -span.size):
        for line in lines:
            if sum(other.size for other in line) + span.size <= width:
                line.append(span)
                break
        else:
            lines.append([span])
    return lines


def _refused(span: _Span, row: int, place: int) -> Tensor:
    """[R, 4], those whose position and teaching row lie inside the span."""
    found = refused_drafts(span.record)
    last = found.positions + 1 + found.steps
    inside = (found.positions >= span.begin) & (last < span.stop)
    lines = torch.full_like(found.positions, row)
    columns = (lines, found.positions - span.begin + place, found.steps, found.tokens)
    return torch.stack(columns, dim=1)[inside]
