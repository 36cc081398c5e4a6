"""What a run shows in the terminal while it goes on.

    with LiveView(minutes=18, target="SmolLM2-135M-Instruct") as view:
        view.event("phase", {"t_s": 0.0, "phase": "starting the server"})
        view.update({"t_s": 12.0, "requests": 3, ...})

The fields are those of `draftloop.cli.run_events`. On a terminal it redraws one panel; elsewhere (a log, CI) it
prints a plain line about every ten seconds and one for each event that matters.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from pydantic import ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from draftloop.cli.run_events import ProgressData

PLAIN_LINE_EVERY_S = 10.0
SHOWN_EVENTS = 5
SPARK_POINTS = 40
SPARKS = "▁▂▃▄▅▆▇█"

# Too frequent to list; the panel's figures already say it. A promotion is followed by its swap.
QUIET_KINDS = frozenset({"progress", "train_step", "candidate", "promoted"})


class LiveView:
    """A context manager; `update` and `event` never raise for odd data, a view must not end a run.

    minutes: the run's budget. target: its name in the title. Entering starts the clock.
    """

    def __init__(self, minutes: float, target: str, console: Console | None = None) -> None:
        self._console = console or Console()
        self._budget_s = minutes * 60.0
        self._target = target
        self._started = time.monotonic()
        self._last_line = 0.0
        self._phase = "starting"
        self._progress: ProgressData | None = None
        self._accept: deque[float] = deque(maxlen=SPARK_POINTS)
        self._swaps = 0
        self._refused = 0
        self._events: deque[tuple[float, str]] = deque(maxlen=SHOWN_EVENTS)
        self._live = (
            Live(console=self._console, get_renderable=self._render, refresh_per_second=2)
            if self._console.is_terminal
            else None
        )

    def __enter__(self) -> LiveView:
        self._started = time.monotonic()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._progress is not None:
            self._print(self._line(self._progress))

    def update(self, progress: Mapping[str, Any]) -> None:
        """Take a `progress` event's data."""
        try:
            data = ProgressData.model_validate(progress)
        except ValidationError:
            return
        self._progress = data
        self._phase = data.phase or self._phase
        if data.accept_length is not None:
            self._accept.append(data.accept_length)
        if self._live is None and time.monotonic() - self._last_line >= PLAIN_LINE_EVERY_S:
            self._last_line = time.monotonic()
            self._print(self._line(data))

    def event(self, kind: str, data: Mapping[str, Any]) -> None:
        """Take any event; `progress` is passed on to `update`."""
        if kind == "progress":
            self.update(data)
            return
        if kind == "phase":
            self._phase = str(data.get("phase", self._phase))
        self._swaps += kind == "swap"
        self._refused += kind == "refused"
        if kind in QUIET_KINDS:
            return
        text = describe(kind, data)
        self._events.append((self._elapsed(), text))
        if self._live is None:
            self._print(f"[{_clock(self._elapsed())}] {text}")

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _line(self, data: ProgressData) -> str:
        parts = [
            f"[{_clock(self._elapsed())}] {self._phase}",
            f"requests {data.requests} ({data.failed} failed)",
            f"{_figure(data.tokens_per_s, 1)} tokens/s",
            f"accepted {_figure(data.accept_length, 2)}",
            f"step {data.train_steps} loss {_figure(data.loss, 3)}",
            f"swaps {self._swaps} refused {self._refused}",
        ]
        return " | ".join(parts)

    def _render(self) -> RenderableType:
        elapsed = self._elapsed()
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column()
        head.add_column(ratio=1)
        head.add_column(justify="right")
        bar = ProgressBar(total=self._budget_s, completed=min(elapsed, self._budget_s))
        head.add_row(Text(self._phase, style="bold"), bar, f"{_clock(elapsed)} of {_clock(self._budget_s)}")
        parts: list[RenderableType] = [head, Text(), self._figures()]
        if self._events:
            parts.append(Text())
            parts += [
                Text.assemble((f"{_clock(at)}  ", "dim"), text, overflow="ellipsis", no_wrap=True)
                for at, text in self._events
            ]
        return Panel(Group(*parts), title=f"draftloop · {self._target}", title_align="left", border_style="blue")

    def _figures(self) -> RenderableType:
        data = self._progress or ProgressData(t_s=0.0)
        failed = Text(f"{data.failed} failed", style="bold red" if data.failed else "dim")
        dropped = Text(f"{data.records_dropped} records dropped", style="yellow" if data.records_dropped else "dim")
        grid = Table.grid(padding=(0, 3))
        for _ in range(3):
            grid.add_column()
        grid.add_row("requests", Text(f"{data.requests:,}", style="bold"), failed)
        grid.add_row("tokens/s", Text(_figure(data.tokens_per_s, 1), style="bold"), "")
        spark = Text(sparkline(self._accept), style="blue")
        grid.add_row("accepted length", Text(_figure(data.accept_length, 2), style="bold"), spark)
        for domain, value in sorted(data.accept_by_domain.items()):
            grid.add_row(Text(f"  {domain}", style="dim"), _figure(value, 2), "")
        steps = Text(f"{data.train_steps:,} train steps", style="dim")
        grid.add_row("loss", Text(_figure(data.loss, 3), style="bold"), steps)
        grid.add_row("captured tokens", Text(f"{data.tokens_captured:,}", style="bold"), dropped)
        version = Text(f"{self._refused} refused; serving {data.version or 'no drafter yet'}", style="dim")
        grid.add_row("swaps", Text(str(self._swaps), style="bold"), version)
        return grid


def describe(kind: str, data: Mapping[str, Any]) -> str:
    """One event in a few plain words."""
    version = data.get("version", "")
    match kind:
        case "phase":
            return f"{data.get('phase', '')}"
        case "swap":
            checksum_ok = data.get("checksum_ok")
            checked = "" if checksum_ok is None else ", checksum verified" if checksum_ok else ", checksum DIFFERS"
            return f"swapped in {version}, stall {_figure(data.get('stall_ms'), 0)} ms{checked}"
        case "refused":
            gate = f"{_figure(data.get('gate_before'), 2)} -> {_figure(data.get('gate_after'), 2)}"
            return f"refused {version}: {gate} {data.get('reason', '')}".rstrip()
        case "measured":
            accept, speed = _figure(data.get("accept_length"), 2), _figure(data.get("tokens_per_s"), 1)
            return f"measured {data.get('what', '')}: accepted {accept}, {speed} tokens/s"
        case _:
            fields = ", ".join(f"{key} {value}" for key, value in data.items() if key != "t_s")
            return f"{kind.replace('_', ' ')}: {fields}" if fields else kind.replace("_", " ")


def sparkline(values: deque[float] | list[float]) -> str:
    """Values as bars between their own lowest and highest; a flat line is low bars."""
    if not values:
        return ""
    low, high = min(values), max(values)
    # Noise about a constant must not look like a mountain range.
    span = max(high - low, 0.1)
    return "".join(SPARKS[min(len(SPARKS) - 1, int((value - low) / span * len(SPARKS)))] for value in values)


def _figure(value: Any, digits: int) -> str:
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else "–"


def _clock(seconds: float) -> str:
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
