"""`draftloop simulate`: the fleet model (`draftloop.refresher.simulate`) run for several sizes, as a Markdown table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from draftloop.core.config import Config
from draftloop.core.errors import ConfigError
from draftloop.drafters.load.cost_model import CostModel, RowCost, StartUp
from draftloop.drafters.load.served import ServedCosts
from draftloop.drafters.load.shapes import Shape
from draftloop.refresher.simulate import Fleet, Forecast, LearningCurve, forecast

MOST_WORKERS = 1000
# Of no use where costs were measured.
ESTIMATES = {"base_ms", "request_ms", "node_ms", "level_ms", "draft_ms"}
_MIB = 1 << 20


def simulate_fleets(config: Config, workers: Sequence[int], seed: int) -> list[Forecast]:
    """One forecast for each fleet size. Raises ConfigError for a size that is not modelled."""
    if wrong := [count for count in workers if not 1 <= count <= MOST_WORKERS]:
        raise ConfigError(f"--workers {wrong[0]}: the model is for 1 to {MOST_WORKERS} workers")
    # Read once: a server that runs writes its report anew every few seconds.
    costs, shape = costs_of(config)
    return [forecast(fleet_of(config, count, costs, shape), config.simulate.seconds, seed) for count in workers]


def fleet_of(config: Config, workers: int, costs: CostModel, shape: Shape) -> Fleet:
    """The config's fleet with this many workers."""
    settings = config.simulate
    return Fleet(
        workers=workers,
        costs=costs,
        curve=LearningCurve(settings.day0_accept_length, settings.best_accept_length, settings.half_tokens),
        clients=settings.clients_per_worker * workers,
        batch=settings.batch,
        tokens=settings.answer_tokens,
        shape=shape,
        trainers=settings.trainers,
        trainer_rate=settings.trainer_tokens_per_s,
        sample_rate=settings.sample_rate,
        bytes_per_token=settings.capture_bytes_per_token,
        drafter_bytes=settings.drafter_mib * _MIB,
        gate_every=settings.gate_seconds,
        swap_stall=settings.swap_stall_ms / 1e3,
        swaps_at_once=settings.swaps_at_once,
    )


def costs_of(config: Config) -> tuple[CostModel, Shape]:
    """What a step costs, and the tree it verifies: as a server measured them, else as the config estimates them."""
    settings, server = config.simulate, config.server
    if settings.costs is not None:
        return _measured(settings.costs)
    estimate = StartUp(
        target=RowCost.line(settings.base_ms / 1e3, settings.node_ms / 1e3),
        draft=RowCost.line(settings.level_ms / 1e3, settings.draft_ms / 1e3),
        # The host's side is in the terms above, the context's in a request's.
        call_seconds=0.0,
        token_seconds=0.0,
        request_seconds=settings.request_ms / 1e3,
    )
    return CostModel(estimate), Shape(server.num_steps, server.topk, server.num_draft_tokens)


def _measured(report: Path) -> tuple[CostModel, Shape]:
    try:
        served = ServedCosts.load(json.loads(report.read_text(encoding="utf-8"))["served"])
    except OSError as err:
        raise ConfigError(f"simulate.costs: cannot read {report}: {err.strerror}") from None
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"simulate.costs: {report} is not a server's report: name a speculation.json from a run's folder"
        ) from None
    return served.costs, served.shape


def as_markdown(config: Config, rows: Sequence[Forecast], seed: int) -> str:
    """The table, what it assumes, and how to read it."""
    lines = [
        "# What refreshing would bring a fleet",
        "",
        f"Made by `draftloop simulate --seed {seed}`: a model, not a measurement. Its inputs stand below; set your own "
        "with `--set simulate.KEY=VALUE` or a `draftloop.yaml`.",
        "",
        "| workers | tokens/s | accepted length | against day-0 drafter | against no speculation "
        "| break-even, requests | capture into trainer, GB/s | useful sample rate | roll-outs, GB |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        even = "none" if row.break_even_requests is None else f"{row.break_even_requests:,}"
        lines.append(
            f"| {row.workers:,} | {row.tokens_per_s:,.0f} | {row.accept_length:.2f} | {row.speedup_static:.2f}x "
            f"| {row.speedup_plain:.2f}x | {even} | {row.capture_bytes_per_s / 1e9:.2f} "
            f"| {row.useful_sample_rate:.3f} | {row.swap_bytes / 1e9:,.0f} |"
        )
    lines += [
        "",
        f"After {config.simulate.seconds:g} simulated seconds. Both comparisons give the trainer's devices to serving, "
        "under the same load. Break-even: requests finished until the refreshed fleet had served as many tokens as the "
        "one with the day-0 drafter. Useful sample rate: sampling that low the trainer still learns as fast, and the "
        "capture traffic shrinks by as much.",
        "",
        "Modelled: steps shared by the running requests, waiting, least-loaded routing, capture, the trainer's rate, "
        "gates, roll-outs a few workers at a time with a stall each. Not modelled: prefill, cache affinity, failures.",
        "",
        "| input | value |",
        "|---|--:|",
    ]
    estimates = config.simulate.model_dump(exclude={"costs"} if config.simulate.costs is None else ESTIMATES)
    lines += [
        f"| `simulate.{name}` | {value:g} |" if isinstance(value, int | float) else f"| `simulate.{name}` | {value} |"
        for name, value in estimates.items()
    ]
    lines.append(f"| tree: levels x width / nodes verified | {rows[0].shape} |")
    return "\n".join(lines) + "\n"
