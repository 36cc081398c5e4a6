"""The draft vocabulary: which target tokens the drafter can say, and the map between the two id spaces.

    draft id d      0   1   2   3
    target id       1   4   5   9        sorted, so the map is increasing
    offset d2t      1   3   3   6        target = d + d2t[d], the layout SGLang loads

A map is always held as sorted target ids [Vd]; offsets exist only as the buffer of a drafter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftloop.core.errors import CheckpointError, ConfigError


def count_tokens(streams: Iterable[Iterable[int]], vocab_size: int) -> Tensor:
    """[V] int64: how often each token occurs in the streams."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for stream in streams:
        ids = torch.as_tensor(list(stream), dtype=torch.int64)
        if ids.numel():
            counts += torch.bincount(ids, minlength=vocab_size)
    return counts


def build_draft_vocab(counts: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """The `size` most frequent tokens as sorted [Vd] int64 target ids.

    counts: [V].  always: ids kept whatever their count (end of sequence, chat markers).  Ties, and the fill
    when fewer tokens were seen, go to the lower id.
    """
    kept = torch.tensor(sorted(set(always)), dtype=torch.int64)
    if not 0 < size <= len(counts):
        raise ConfigError(f"draft_vocab_size {size} must be between 1 and the target's vocabulary {len(counts)}")
    if len(kept) > size:
        raise ConfigError(f"draft_vocab_size {size} cannot hold the {len(kept)} tokens that must always be in it")
    if len(kept) and (int(kept[0]) < 0 or int(kept[-1]) >= len(counts)):
        raise ConfigError(f"special token ids {kept.tolist()} do not fit a vocabulary of {len(counts)}")
    rank = counts.to(torch.int64).clone()
    rank[kept] = torch.iinfo(torch.int64).max
    return torch.argsort(rank, descending=True, stable=True)[:size].sort().values


@dataclass(frozen=True)
class VocabMove:
    """From one draft vocabulary to another of the same size.

    ids: [Vd] int64, the new map.  kept: [Vd] bool, new draft ids whose token the old map had.  source: [Vd] int64, the
    old draft id of a kept token (0 elsewhere).

        old map     1   4   5   9
        new map     1   5   7   9        kept  T T . T    source  0 2 0 3
    """

    ids: Tensor
    kept: Tensor
    source: Tensor

    def to(self, device: torch.device | str) -> VocabMove:
        return VocabMove(self.ids.to(device), self.kept.to(device), self.source.to(device))

    def carry(self, rows: Tensor, fresh: Tensor) -> Tensor:
        """Rows [Vd, ...] of the old map in the new one's order, with those of `fresh` [Vd, ...] for new tokens."""
        kept = self.kept.view(-1, *(1,) * (rows.dim() - 1))
        return torch.where(kept, rows[self.source], fresh)


def move_vocab(old: Tensor, new: Tensor) -> VocabMove:
    """old, new: sorted target ids [Vd] of one length. Raises CheckpointError for another length."""
    if len(old) != len(new):
        raise CheckpointError(f"a draft vocabulary of {len(old)} tokens cannot become one of {len(new)}")
    place = torch.searchsorted(old, new).clamp(max=len(old) - 1)
    kept = old[place] == new
    return VocabMove(new, kept, torch.where(kept, place, 0))


def coverage(counts: Tensor, ids: Tensor) -> float:
    """The share of counted tokens [V] that a draft vocabulary [Vd] holds; 1 when nothing was counted."""
    total = int(counts.sum())
    return int(counts[ids].sum()) / total if total else 1.0


def check_draft_ids(ids: Tensor, vocab_size: int) -> None:
    """Raise CheckpointError unless ids [Vd] are int64, strictly increasing and within the target's vocabulary."""
    if ids.dtype != torch.int64 or ids.dim() != 1 or len(ids) == 0:
        raise CheckpointError(f"the draft vocabulary map must be a non-empty int64 vector, not {ids.dtype}")
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or bool((ids[1:] <= ids[:-1]).any()):
        raise CheckpointError(
            f"the draft vocabulary map is not a strictly increasing list of target ids below {vocab_size}; "
            "rebuild the drafter with `build_draft_vocab`"
        )


def offsets_from_ids(ids: Tensor, vocab_size: int) -> Tensor:
    """Sorted target ids [Vd] -> offsets d2t [Vd]."""
    check_draft_ids(ids, vocab_size)
    return ids - torch.arange(len(ids), device=ids.device)


def ids_from_offsets(d2t: Tensor) -> Tensor:
    """Offsets d2t [Vd] -> target ids [Vd]."""
    return d2t + torch.arange(len(d2t), device=d2t.device)
