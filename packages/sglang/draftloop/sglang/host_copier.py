"""Brings device tensors to the host off the serving path, first in, first out."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

MOST_PENDING_COPIES = 64

Emit = Callable[[list[NDArray[Any]]], None]


class HostCopier:
    """Clones on the compute stream, copies on its own, and hands over in a thread once the copy's event has passed.

    At most MOST_PENDING_COPIES are under way; a further one is refused.
    """

    def __init__(self) -> None:
        self._pending: queue.SimpleQueue[tuple[Any, list[torch.Tensor], Emit]] = queue.SimpleQueue()
        # Copies begun and emitted; each is written by one thread only.
        self._submitted = self._done = 0
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        threading.Thread(target=self._run, name="draftloop-tap", daemon=True).start()

    def submit(self, tensors: tuple[torch.Tensor, ...], emit: Emit) -> bool:
        """Call `emit` with the host copies, later and in order; False when too many copies are under way."""
        if self._submitted - self._done >= MOST_PENDING_COPIES:
            return False
        # Decode graphs reuse one buffer: cloned on the compute stream before the next replay may overwrite it.
        clones = [tensor.clone() for tensor in tensors]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host = []
            for clone in clones:
                clone.record_stream(self._stream)
                pinned = torch.empty(clone.shape, dtype=clone.dtype, pin_memory=True)
                host.append(pinned.copy_(clone, non_blocking=True))
            event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._submitted += 1
        self._pending.put((event, host, emit))
        return True

    def call(self, action: Callable[[], None]) -> None:
        """Call `action` when all that was submitted before it has been emitted. Never refused."""
        self._pending.put((None, [], lambda _: action()))

    def _run(self) -> None:
        while True:
            event, host, emit = self._pending.get()
            if event is None:
                emit([])
                continue
            event.synchronize()
            emit([as_numpy(tensor) for tensor in host])
            self._done += 1


def as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """A host tensor as numpy; bfloat16, which numpy lacks, as its uint16 bits (see capture.wire)."""
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().contiguous().view(torch.int16).numpy().view(np.uint16)
    return tensor.detach().numpy()
