"""`report.html`: one self-contained page about a run, from its summary and events.

The page holds its own style and plotting library and forbids the browser any request, so it can be mailed or
kept beside the run. It is as valid for a run that was cut short: what was not measured is said to be so.
The events it reads are described in `draftloop.cli.run_events`.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from draftloop.cli import charts
from draftloop.cli.run_events import RunEvents, parse_events
from draftloop.core.events import Event
from draftloop.core.summary import BeforeAfter, Summary, write_atomic

REPORT_FILE = "report.html"

# Nothing may be fetched: the page must look the same on a machine without a network.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

NOT_MEASURED = '<span class="none">not measured</span>'


def write_report(out_dir: Path, summary: Summary, events: Iterable[Event]) -> Path:
    """Write `out_dir`/report.html, whole or not at all, and return its path.

    `events` may be empty or end anywhere. Raises DraftloopError when the file cannot be written.
    """
    path = out_dir / REPORT_FILE
    write_atomic(path, render(summary, parse_events(events)))
    return path


def render(summary: Summary, run: RunEvents) -> str:
    """The page as HTML text."""
    style = files("draftloop.cli").joinpath("report.css").read_text(encoding="utf-8")
    body = "\n".join(
        [
            _header(summary),
            _banner(summary),
            _hero_tiles(summary),
            _small_tiles(summary),
            _chart_sections(summary, run),
            _gate_table(summary),
            _near_ties(summary),
            _about(summary, run),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>draftloop: {escape(summary.target)}</title>\n<style>\n{style}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _header(summary: Summary) -> str:
    facts = [
        f"{summary.drafter.kind} drafter",
        f"device {summary.device}",
        f"seed {summary.seed}",
        f"ran {_duration(summary.elapsed_s)} of a {summary.minutes:g} min budget",
    ]
    return (
        f"<header><div><h1>{escape(summary.target)}: drafter refreshed from live traffic</h1>"
        f'<p class="sub">{escape(" · ".join(facts))}</p></div>'
        f'<span class="badge {summary.status}">{summary.status.capitalize()}</span></header>'
    )


def _banner(summary: Summary) -> str:
    if summary.status == "finished":
        return ""
    what = "was interrupted" if summary.status == "interrupted" else "failed"
    resume = f" To go on: <code>{escape(summary.resume)}</code>" if summary.resume else ""
    return (
        f'<div class="banner {summary.status}">This run {what} after {_duration(summary.elapsed_s)}. '
        f"The page shows what was done up to then; the rest says that it was not measured.{resume}</div>"
    )


def _hero_tiles(summary: Summary) -> str:
    accept, speed = summary.accept_length, summary.tokens_per_s
    if speed.plain and speed.final is not None:
        fast = f"{speed.final / speed.plain:.2f}× <small>of plain decoding</small>"
        day0 = f"day-0 drafter {speed.day0 / speed.plain:.2f}×; " if speed.day0 is not None else ""
        fast_note = f"{day0}batch 1, greedy, the same prompts for all three"
    else:
        fast, fast_note = NOT_MEASURED, "needs plain decoding and the refreshed drafter on the same prompts"
    identity, identity_note = _identity(summary)
    tiles = [
        _tile(
            "Accepted length",
            _change(accept),
            "day-0 to refreshed drafter; tokens per target step on held-out prompts, 1.00 = no draft accepted",
        ),
        _tile("Speed", fast, fast_note),
        _tile("Output identical to plain decoding", identity, identity_note),
    ]
    return f'<section class="grid three hero">{"".join(tiles)}</section>'


def _identity(summary: Summary) -> tuple[str, str]:
    compared = f"{summary.compared:,} greedy outputs, {summary.compared_tokens:,} tokens compared"
    if summary.near_ties:
        compared += f"; near ties: {len(summary.near_ties)}"
    if summary.token_identical is None:
        return NOT_MEASURED, "no held-out outputs were compared"
    if summary.token_identical:
        return '<span class="good">Yes</span> <small>token by token</small>', compared
    return '<span class="bad">No</span> <small>some tokens differ</small>', compared


def _small_tiles(summary: Summary) -> str:
    bad_swaps = sum(1 for swap in summary.swaps if swap.checksum_ok is False)
    checks = f"{bad_swaps} with a wrong checksum" if bad_swaps else "in place, no restart"
    ratio = summary.capture_overhead.ratio_on_off
    pairs = len(summary.capture_overhead.pairs)
    overhead = f"{(1 - ratio) * 100:.1f} %" if ratio is not None else NOT_MEASURED
    failed = f'<span class="bad">{summary.failed_requests:,}</span>' if summary.failed_requests else "0"
    tiles = [
        _tile("Swaps / refused", f"{len(summary.swaps)} <small>/ {len(summary.refused)}</small>", checks),
        _tile("Requests / failed", f"{summary.requests:,} <small>/ {failed}</small>", "all traffic of this run"),
        _tile(
            "Tokens captured",
            f"{summary.tokens_captured:,}",
            f"{summary.train_steps:,} train steps; {summary.records_dropped:,} records dropped",
        ),
        _tile(
            "Capture overhead",
            overhead,
            f"serving throughput lost, {pairs} paired runs" if pairs else "no paired runs were made",
        ),
    ]
    return f'<section class="grid four">{"".join(tiles)}</section>'


def _chart_sections(summary: Summary, run: RunEvents) -> str:
    accept = _chart(
        "chart-accept",
        "Accepted length over time",
        "Tokens emitted per target step. Dotted lines are swaps, labelled with the version that went into service; "
        "diamonds are measured on held-out prompts that were never trained on.",
        charts.accept_length_figure(run),
    )
    domains = _chart(
        "chart-domains",
        "By domain",
        "Lines: live traffic; diamonds: held-out prompts. A domain with little traffic improves late.",
        charts.domain_figure(run),
    )
    loss = _chart(
        "chart-loss",
        "Training loss",
        "On captured traffic, so it moves with the traffic; the gate decides, not the loss.",
        charts.loss_figure(run),
    )
    speed = _chart("chart-speed", "Generation speed, batch 1", _speed_note(summary), charts.speed_figure(summary))
    stalls = _chart(
        "chart-stalls",
        "Swap stalls",
        "How long serving stood still while new weights went in. Requests in flight wait and then go on.",
        charts.stall_figure(summary, run),
    )
    return (
        f'<section class="grid">{accept}</section><section class="grid two">{domains}{loss}</section>'
        f'<section class="grid two">{speed}{stalls}</section>{_speculation_section(run)}'
    )


def _speculation_section(run: RunEvents) -> str:
    """Only for runs whose server followed its load."""
    if not run.speculation:
        return ""
    reliability = _chart(
        "chart-reliability",
        "Calibration of the drafter",
        "Drafts accepted by the drafter's confidence in them; on the grey line the two agree. The server corrects by "
        "this curve before it chooses a shape.",
        charts.reliability_figure(run),
    )
    shapes = _chart(
        "chart-shapes",
        "Speculation by load",
        "Shapes run at each batch size: levels x width / nodes verified. Plain decoding lets the drafter rest.",
        charts.shapes_figure(run),
    )
    return f'<section class="grid two">{reliability}{shapes}</section>'


def _speed_note(summary: Summary) -> str:
    note = "A verify step costs more than a one-token step: "
    speed, accepted = summary.tokens_per_s, summary.accept_length.final
    if speed.plain and speed.final and accepted:
        # tokens/s = accepted length / step time, and plain decoding's step makes one token.
        cost = accepted * speed.plain / speed.final
        return f"{note}here about {cost:.1f}× (drafting included), so speed follows once accepted length is above that."
    return f"{note}speed exceeds plain decoding once accepted length is above that ratio."


def _chart(div_id: str, title: str, note: str, figure: Any | None) -> str:
    if figure is None:
        drawn = f'<div id="{div_id}" class="empty">No data in this run</div>'
    else:
        plot = figure.to_html(
            full_html=False,
            include_plotlyjs=False,
            div_id=div_id,
            config={"displayModeBar": False, "responsive": True},
        )
        drawn = f'<div class="chart">{plot}</div>'
    return f'<article class="card"><h2>{title}</h2><p class="note">{escape(note)}</p>{drawn}</article>'


def _gate_table(summary: Summary) -> str:
    rows = [
        (swap.time_s, swap.version, swap.gate_before, swap.gate_after, _swap_outcome(swap.checksum_ok))
        for swap in summary.swaps
    ]
    rows += [
        (no.time_s, no.version, no.gate_before, no.gate_after, f'<span class="bad">refused</span>, {escape(no.reason)}')
        for no in summary.refused
    ]
    if rows:
        head = (
            '<tr><th class="num">at</th><th>version</th><th class="num">serving</th><th class="num">candidate</th>'
            '<th class="num">gain</th><th>outcome</th></tr>'
        )
        body = "".join(
            f'<tr><td class="num">{_duration(time_s)}</td><td class="mono">{escape(version)}</td>'
            f'<td class="num">{_number(before)}</td><td class="num">{_number(after)}</td>'
            f'<td class="num">{_gain(before, after)}</td><td>{outcome}</td></tr>'
            for time_s, version, before, after, outcome in sorted(rows, key=lambda row: row[0])
        )
        shown = f'<table id="gate">{head}{body}</table>'
    else:
        shown = '<div id="gate" class="empty">No candidate reached the gate</div>'
    return (
        '<section class="grid"><article class="card"><h2>The gate</h2><p class="note">Expected accepted length of '
        "the serving drafter and of the candidate on the same recent records, kept out of training. Only a candidate "
        f"that gains goes into service.</p>{shown}</article></section>"
    )


def _swap_outcome(checksum_ok: bool | None) -> str:
    if checksum_ok is None:
        return "promoted"
    if checksum_ok:
        return '<span class="good">promoted</span>, checksum verified'
    return '<span class="bad">promoted, checksum differs</span>'


def _near_ties(summary: Summary) -> str:
    if not summary.near_ties:
        return ""
    rows = "".join(
        f'<tr><td class="num">{tie.prompt}</td><td class="num">{tie.position}</td><td>{tie.gap:.1e}</td></tr>'
        for tie in summary.near_ties
    )
    return (
        '<section class="grid"><article class="card"><h2>Near ties</h2><p class="note">Places where plain decoding\'s '
        "own two best logits lie within 1e-3, so that another batch shape may pick the other one. They do not count "
        "against identity up to 1 % of the prompts.</p>"
        '<table class="narrow"><tr><th class="num">prompt</th><th class="num">token</th><th>logit gap</th></tr>'
        f"{rows}</table></article></section>"
    )


def _about(summary: Summary, run: RunEvents) -> str:
    versions = summary.versions
    facts = [
        ("Target", summary.target),
        ("Drafter versions", ", ".join(summary.drafter.versions) or "none"),
        ("SGLang", versions.sglang),
        ("PyTorch", versions.torch),
        ("Transformers", versions.transformers),
        ("Ray", versions.ray),
    ]
    if run.unreadable:
        facts.append(("Events not shown", f"{run.unreadable} could not be read"))
    table = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return (
        '<section class="grid two"><article class="card"><h2>How to read this</h2><ul class="notes">'
        "<li>Held-out figures are greedy and on prompts that were never trained on; live figures are of whatever the "
        "fleet was asked in the last moments.</li>"
        "<li>Speed is one request at a time. At larger batches verification competes with other requests for the same "
        "compute, and the gain shrinks.</li>"
        "<li>Records are dropped, and counted, when the capture queue is full: serving never waits for training.</li>"
        "<li>While a run trains on the machine that serves, live throughput is lower than the measured speed.</li>"
        "<li>Speculation changes how fast tokens come, not which: the target verifies every one.</li></ul></article>"
        f'<article class="card"><h2>This run</h2><dl>{table}</dl></article></section>'
    )


def _tile(label: str, value: str, note: str) -> str:
    return (
        f'<div class="card"><div class="label">{escape(label)}</div><div class="value">{value}</div>'
        f'<div class="note">{escape(note)}</div></div>'
    )


def _change(figure: BeforeAfter) -> str:
    if figure.day0 is None and figure.final is None:
        return NOT_MEASURED
    return (
        f'<span class="day0">{_number(figure.day0)}</span><span class="arrow">→</span>'
        f'<span class="refreshed">{_number(figure.final)}</span>'
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _gain(before: float | None, after: float | None) -> str:
    return "–" if before is None or after is None else f"{after - before:+.2f}".replace("-", "−")


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
