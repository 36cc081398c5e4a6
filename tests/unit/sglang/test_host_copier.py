"""The copies from a GPU arrive in order, and a full house refuses one more. Needs a GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from draftloop.sglang.host_copier import MOST_PENDING_COPIES, HostCopier, as_numpy

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="copies from a GPU")
WITHIN_S = 60.0


def test_bfloat16_arrives_as_its_bits() -> None:
    exact = torch.tensor([[1.0, -2.5], [0.15625, 3e38]], dtype=torch.bfloat16)
    bits = as_numpy(exact)
    assert bits.dtype == "uint16"
    assert torch.equal(torch.from_numpy(bits.view("int16")).view(torch.bfloat16), exact)


@on_gpu
def test_copies_and_calls_keep_their_order() -> None:
    copier, seen, done = HostCopier(), [], threading.Event()
    for number in range(40):
        tensor = torch.full((1 << 16,), number, device="cuda", dtype=torch.int32)
        assert copier.submit((tensor,), lambda host: seen.append(sorted({int(x) for x in host[0]})))
        tensor.fill_(-1)  # as the next step does to a graph's buffer
        copier.call(lambda number=number: seen.append(f"after {number}"))  # type: ignore[misc]
        torch.cuda.synchronize()
    copier.call(done.set)
    assert done.wait(WITHIN_S)
    assert seen == [entry for number in range(40) for entry in ([number], f"after {number}")]


@on_gpu
def test_a_full_house_refuses_copies_but_no_call() -> None:
    copier, release, done = HostCopier(), threading.Event(), threading.Event()
    emitted: list[Any] = []

    def wait(host: list[Any]) -> None:
        release.wait(WITHIN_S)
        emitted.append(host)

    tensor = torch.zeros(4, device="cuda")
    taken = [copier.submit((tensor,), wait) for _ in range(MOST_PENDING_COPIES + 3)]
    assert taken == [True] * MOST_PENDING_COPIES + [False] * 3
    copier.call(done.set)
    release.set()
    assert done.wait(WITHIN_S)
    assert len(emitted) == MOST_PENDING_COPIES
    assert copier.submit((tensor,), emitted.append)
