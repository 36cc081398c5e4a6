"""The report's figures: plotly, one look, each None when there is nothing to draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import plotly.graph_objects as go

from draftloop.cli.run_events import RunEvents
from draftloop.core.summary import Summary

PLAIN = "#8793a6"
DAY0 = "#d9902f"
REFRESHED = "#1f6feb"
REFUSED = "#c0362c"
INK = "#1c2430"
MUTED = "#5b6676"
GRID = "#e8ebf0"
DOMAINS = ("#6b4fbb", "#0f8b6f", "#b8478a", "#8a6d1f", "#2f7f9e", "#7a4a32")

T = TypeVar("T")

HELD_OUT = {"size": 11, "symbol": "diamond", "line": {"color": "#ffffff", "width": 1.5}}

# A browser draws this many points at ease; a run of days has more.
MAX_POINTS = 1500


def accept_length_figure(run: RunEvents) -> Any | None:
    """Accepted length over time: live traffic, held-out measurements, swaps and refusals."""
    unit, scale = _time_unit(run.end_s)
    live = [p for p in _thin(run.progress) if p.accept_length is not None]
    measured = [m for m in run.measured if m.accept_length is not None and m.what != "plain"]
    if not live and not measured:
        return None
    fig = _figure(height=360)
    fig.add_scatter(
        x=[p.t_s / scale for p in live],
        y=[p.accept_length for p in live],
        name="live traffic (recent window)",
        mode="lines",
        line={"color": REFRESHED, "width": 2},
        hovertemplate="%{y:.2f} tokens a step<extra></extra>",
    )
    fig.add_scatter(
        x=[m.t_s / scale for m in measured],
        y=[m.accept_length for m in measured],
        name="held-out prompts",
        mode="markers",
        marker={**HELD_OUT, "color": [DAY0 if m.what == "day0" else REFRESHED for m in measured]},
        text=[m.what for m in measured],
        hovertemplate="%{text}: %{y:.2f} on held-out prompts<extra></extra>",
    )
    _mark_swaps(fig, run, scale, labels=True)
    _mark_refusals(fig, run, scale)
    _mark_drifts(fig, run, scale)
    # A day-0 drafter sits at 1.0: it must not lie on the axis, nor noise fill the picture.
    top = max(y for y in [*(p.accept_length for p in live), *(m.accept_length for m in measured)] if y is not None)
    fig.update_yaxes(title=_title("tokens per target step"), range=[0.85, max(2.0, top * 1.08)])
    fig.update_xaxes(title=_title(unit))
    return fig


def domain_figure(run: RunEvents) -> Any | None:
    """Accepted length of live traffic, one line a domain."""
    unit, scale = _time_unit(run.end_s)
    points = _thin(run.progress)
    domains = sorted({name for p in points for name, value in p.accept_by_domain.items() if value is not None})
    if not domains:
        return None
    fig = _figure()
    for index, name in enumerate(domains):
        line = [(p.t_s / scale, p.accept_by_domain[name]) for p in points if p.accept_by_domain.get(name) is not None]
        fig.add_scatter(
            x=[x for x, _ in line],
            y=[y for _, y in line],
            name=name,
            mode="lines",
            line={"color": DOMAINS[index % len(DOMAINS)], "width": 2},
            hovertemplate="%{y:.2f}",
        )
        held_out = [(m.t_s / scale, m.by_domain[name]) for m in run.measured if m.by_domain.get(name) is not None]
        fig.add_scatter(
            x=[x for x, _ in held_out],
            y=[y for _, y in held_out],
            mode="markers",
            marker={**HELD_OUT, "color": DOMAINS[index % len(DOMAINS)]},
            showlegend=False,
            hovertemplate=f"{name}, held-out: %{{y:.2f}}<extra></extra>",
        )
    _mark_swaps(fig, run, scale, labels=False)
    fig.update_yaxes(title=_title("tokens per target step"))
    fig.update_xaxes(title=_title(unit))
    return fig


def loss_figure(run: RunEvents) -> Any | None:
    """Training loss over optimiser steps: each sampled step faint, a running mean over it."""
    line = [(float(s.step), s.loss) for s in _thin(run.train_steps) if s.loss is not None]
    if not line:
        # No sampled steps: the progress snapshots still carry the loss.
        line = [(float(p.train_steps), p.loss) for p in _thin(run.progress) if p.loss is not None and p.train_steps]
    if not line:
        return None
    steps = [x for x, _ in line]
    losses = [y for _, y in line]
    fig = _figure()
    fig.add_scatter(
        x=steps,
        y=losses,
        name="step",
        mode="lines",
        line={"color": "#c3cbd8", "width": 1},
        hoverinfo="skip",
    )
    fig.add_scatter(
        x=steps,
        y=_running_mean(losses),
        name="running mean",
        mode="lines",
        line={"color": INK, "width": 2},
        hovertemplate="%{y:.3f}",
    )
    fig.update_yaxes(title=_title("loss"), rangemode="tozero")
    fig.update_xaxes(title=_title("train step"))
    return fig


def speed_figure(summary: Summary) -> Any | None:
    """Tokens/s at batch 1: plain decoding, day-0 drafter, refreshed drafter."""
    speed = summary.tokens_per_s
    bars = [("plain decoding", speed.plain, PLAIN), ("day-0 drafter", speed.day0, DAY0)]
    bars.append(("refreshed drafter", speed.final, REFRESHED))
    known = [(name, value, colour) for name, value, colour in bars if value is not None]
    if not known:
        return None
    labels = [f"<b>{value:.1f}</b>" + _times(value, speed.plain) for _, value, _ in known]
    fig = _figure(legend=False)
    fig.add_bar(
        x=[name for name, _, _ in known],
        y=[value for _, value, _ in known],
        marker_color=[colour for _, _, colour in known],
        text=labels,
        textposition="outside",
        cliponaxis=False,
        width=0.5,
        hoverinfo="skip",
    )
    fig.update_yaxes(title=_title("tokens/s"), range=[0, max(value for _, value, _ in known) * 1.18])
    return fig


def stall_figure(summary: Summary, run: RunEvents) -> Any | None:
    """How long serving stood still at each swap, in milliseconds."""
    stalls = [(s.version, s.stall_ms) for s in summary.swaps if s.stall_ms is not None]
    if not stalls:
        # An interrupted run's summary may be older than its last events.
        stalls = [(s.version, s.stall_ms) for s in run.swaps if s.stall_ms is not None]
    if not stalls:
        return None
    fig = _figure(legend=False)
    fig.add_bar(
        x=[version for version, _ in stalls],
        y=[ms for _, ms in stalls],
        marker_color=REFRESHED,
        text=[f"{ms:.0f}" for _, ms in stalls] if len(stalls) <= 16 else None,
        textposition="outside",
        cliponaxis=False,
        width=min(0.5, 0.1 * len(stalls) + 0.1),
        hovertemplate="%{x}: %{y:.1f} ms<extra></extra>",
    )
    fig.update_yaxes(title=_title("stall, ms"), range=[0, max(ms for _, ms in stalls) * 1.18 or 1.0])
    fig.update_xaxes(type="category", title=_title("version put in service"))
    return fig


def reliability_figure(run: RunEvents) -> Any | None:
    """Share of drafts accepted by the drafter's confidence in them, one line a level of the tree."""
    if not run.speculation:
        return None
    fig = _figure()
    fig.add_scatter(
        x=[0, 1], y=[0, 1], mode="lines", line={"color": GRID, "width": 2}, showlegend=False, hoverinfo="skip"
    )
    for level, points in enumerate(run.speculation[-1].reliability):
        fig.add_scatter(
            x=[confidence for confidence, _, _ in points],
            y=[accepted for _, accepted, _ in points],
            customdata=[drafts for _, _, drafts in points],
            name=f"level {level + 1}",
            mode="lines+markers",
            line={"color": DOMAINS[level % len(DOMAINS)], "width": 2},
            hovertemplate="%{y:.2f} of %{customdata:.0f} drafts",
        )
    fig.update_xaxes(title=_title("draft confidence (product along the path)"), range=[0, 1])
    fig.update_yaxes(title=_title("accepted"), range=[0, 1])
    return fig


def shapes_figure(run: RunEvents) -> Any | None:
    """Which shapes were run at each batch size, as shares of its steps."""
    steps = run.speculation[-1].steps if run.speculation else {}
    if not steps:
        return None
    fig = _figure()
    shapes = sorted(
        {shape for counts in steps.values() for shape in counts}, key=lambda shape: (shape != "plain", shape)
    )
    for index, shape in enumerate(shapes):
        fig.add_bar(
            x=list(steps),
            y=[counts.get(shape, 0) / sum(counts.values()) for counts in steps.values()],
            name=shape,
            marker_color=PLAIN if shape == "plain" else DOMAINS[index % len(DOMAINS)],
            hovertemplate="%{y:.0%}",
        )
    fig.update_layout(barmode="stack")
    fig.update_xaxes(type="category", title=_title("requests in the batch"))
    fig.update_yaxes(title=_title("share of steps"), range=[0, 1])
    return fig


def _figure(height: int = 300, legend: bool = True) -> Any:
    fig = go.Figure()
    fig.update_layout(
        height=height,
        margin={"l": 58, "r": 18, "t": 34 if legend else 14, "b": 46},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": MUTED},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 12}},
        hovermode="x unified",
        hoverlabel={"bgcolor": "#ffffff", "bordercolor": GRID},
        bargap=0.4,
    )
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": GRID}
    fig.update_xaxes(**axis, showgrid=False, showline=True)
    fig.update_yaxes(**axis)
    return fig


def _title(text: str) -> dict[str, Any]:
    return {"text": text, "font": {"size": 12}, "standoff": 8}


def _mark_swaps(fig: Any, run: RunEvents, scale: float, labels: bool) -> None:
    # Labels of many swaps would lie over each other: keep about a dozen.
    every = max(1, -(-len(run.swaps) // 12))
    for index, swap in enumerate(run.swaps):
        fig.add_vline(x=swap.t_s / scale, line={"color": REFRESHED, "width": 1, "dash": "dot"}, opacity=0.6)
        if labels and index % every == 0:
            fig.add_annotation(
                x=swap.t_s / scale,
                y=0.0,
                yref="paper",
                text=swap.version,
                showarrow=False,
                xanchor="left",
                yanchor="bottom",
                xshift=2,
                font={"size": 11, "color": REFRESHED},
            )


def _mark_refusals(fig: Any, run: RunEvents, scale: float) -> None:
    if run.refused:
        fig.add_scatter(
            x=[r.t_s / scale for r in run.refused],
            y=[0.93] * len(run.refused),
            name="candidate refused",
            mode="markers",
            marker={"color": REFUSED, "size": 9, "symbol": "x"},
            text=[f"{r.version} refused {r.reason}".strip() for r in run.refused],
            hovertemplate="%{text}<extra></extra>",
        )


def _mark_drifts(fig: Any, run: RunEvents, scale: float) -> None:
    if run.drifts:
        fig.add_scatter(
            x=[d.t_s / scale for d in run.drifts],
            y=[0.93] * len(run.drifts),
            name="drift alarm",
            mode="markers",
            marker={"color": DAY0, "size": 10, "symbol": "triangle-up"},
            text=[f"{d.signal.replace('_', ' ')}: {d.action.replace('_', ' ')}" for d in run.drifts],
            hovertemplate="%{text}<extra></extra>",
        )


def _time_unit(end_s: float) -> tuple[str, float]:
    """Axis title and seconds per unit, so that a run reads as tens of something."""
    if end_s < 180:
        return "seconds since start", 1.0
    if end_s < 3 * 3600:
        return "minutes since start", 60.0
    return "hours since start", 3600.0


def _thin(points: Sequence[T]) -> Sequence[T]:
    return points[:: max(1, -(-len(points) // MAX_POINTS))]


def _running_mean(values: Sequence[float], window: int = 15) -> list[float]:
    means = []
    for index in range(len(values)):
        recent = values[max(0, index - window + 1) : index + 1]
        means.append(sum(recent) / len(recent))
    return means


def _times(value: float, plain: float | None) -> str:
    return f" ({value / plain:.2f}×)" if plain else ""
