"""The stall of a swap as a streaming client sees it: its longest wait for a token, less its usual one."""

from __future__ import annotations

import statistics
import threading
import time
from types import TracebackType

import httpx

WARM_UP_PIECES = 6
MOST_TOKENS = 512  # more than any swap takes
WAIT_S = 30.0


class StallProbe:
    """A context manager: one streaming request of its own runs before, during and after the body.

    with StallProbe(url, "heldout--probe", context_length) as probe:
        swap(...)
    probe.stall_ms
    """

    def __init__(self, base_url: str, request_id: str, context_length: int) -> None:
        self._url = f"{base_url}/generate"
        most_tokens = min(MOST_TOKENS, context_length // 2)
        self._body = {
            "rid": request_id,
            "text": "Count from one to a hundred in words.",
            "stream": True,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": most_tokens, "ignore_eos": True},
        }
        self._arrivals: list[float] = []
        self._warm = threading.Event()
        self._cooled = threading.Event()
        self._after: int | None = None
        self._thread = threading.Thread(target=self._stream, name="draftloop-stall-probe", daemon=True)
        self.stall_ms: float | None = None
        self.step_ms: float | None = None

    def __enter__(self) -> StallProbe:
        self._thread.start()
        self._warm.wait(WAIT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._after = len(self._arrivals) + WARM_UP_PIECES
        self._cooled.wait(WAIT_S)
        gaps = [later - earlier for earlier, later in zip(self._arrivals, self._arrivals[1:], strict=False)]
        if error is None and len(gaps) >= WARM_UP_PIECES:
            self.step_ms = statistics.median(gaps) * 1e3
            self.stall_ms = max(gaps) * 1e3 - self.step_ms

    def _stream(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=WAIT_S, trust_env=False) as response:
                for line in response.iter_lines():
                    if line.startswith("data:"):
                        self._arrivals.append(time.perf_counter())
                    if len(self._arrivals) >= WARM_UP_PIECES:
                        self._warm.set()
                    if self._after is not None and len(self._arrivals) >= self._after:
                        return
        except httpx.HTTPError:
            return  # a dead server is the swap's own news, with a better message
        finally:
            self._warm.set()
            self._cooled.set()
