"""Capture records -> one right-padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftloop.core.records import CaptureRecord


@dataclass(frozen=True)
class Batch:
    """Padded spans; row t of every field belongs to token t of the span.

    token_ids: [B, T] int64.  fused: [B, T, K*H].  last_hidden: [B, T, H].  lengths: [B] int64, valid rows.
    generated: [B, T] bool, True where the row's target logits speak about a generated token (padding: False).

        token        p0   p1   p2 | a0   a1   <end>        prompt of 3, answer of 3
        generated     .    .    T    T    T    T           row 2 predicts a0
    """

    token_ids: Tensor
    fused: Tensor
    last_hidden: Tensor
    lengths: Tensor
    generated: Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


def collate(
    records: Sequence[CaptureRecord],
    max_length: int,
    device: torch.device | str,
    generator: torch.Generator | None = None,
) -> Batch:
    """Pad records to the longest of them, in fp32.

    A record longer than `max_length` is cropped at a random place by `generator`, or to its end without one.
    """
    spans = [_crop(record, max_length, generator) for record in records]
    width = max(stop - begin for begin, stop in spans)
    first = records[0]
    token_ids = torch.zeros(len(records), width, dtype=torch.int64)
    fused = torch.zeros(len(records), width, first.fused.shape[1])
    last_hidden = torch.zeros(len(records), width, first.last_hidden.shape[1])
    generated = torch.zeros(len(records), width, dtype=torch.bool)
    for row, (record, (begin, stop)) in enumerate(zip(records, spans, strict=True)):
        size = stop - begin
        token_ids[row, :size] = torch.from_numpy(record.token_ids[begin:stop])
        fused[row, :size] = torch.from_numpy(record.fused[begin:stop])
        last_hidden[row, :size] = torch.from_numpy(record.last_hidden[begin:stop])
        generated[row, :size] = torch.arange(record.start + begin, record.start + stop) >= record.prompt_len - 1
    lengths = torch.tensor([stop - begin for begin, stop in spans])
    return Batch(*(t.to(device) for t in (token_ids, fused, last_hidden, lengths, generated)))


def _crop(record: CaptureRecord, max_length: int, generator: torch.Generator | None) -> tuple[int, int]:
    spare = record.num_tokens - max_length
    if spare <= 0:
        return 0, record.num_tokens
    begin = spare if generator is None else int(torch.randint(spare + 1, (), generator=generator))
    return begin, begin + max_length
