"""`draftloop simulate`: the fleet model (`draftloop.refresher.simulate`) run for several sizes, as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

from draftloop.core.config import Config, SimulateConfig
from draftloop.core.errors import ConfigError
from draftloop.core.step_costs import StepCosts
from draftloop.refresher.simulate import Fleet, Forecast, LearningCurve, forecast

MOST_WORKERS = 1000
_MIB = 1 << 20


def simulate_fleets(config: Config, workers: Sequence[int], seed: int) -> list[Forecast]:
    """One forecast for each fleet size. Raises ConfigError for a size that is not modelled."""
    if wrong := [count for count in workers if not 1 <= count <= MOST_WORKERS]:
        raise ConfigError(f"--workers {wrong[0]}: the model is for 1 to {MOST_WORKERS} workers")
    return [forecast(fleet_of(config, count), config.simulate.seconds, seed) for count in workers]


def fleet_of(config: Config, workers: int) -> Fleet:
    """The config's fleet with this many workers; the tree is the server's."""
    settings = config.simulate
    return Fleet(
        workers=workers,
        costs=costs_of(settings),
        curve=LearningCurve(settings.day0_accept_length, settings.best_accept_length, settings.half_tokens),
        clients=settings.clients_per_worker * workers,
        batch=settings.batch,
        tokens=settings.answer_tokens,
        nodes=config.server.num_draft_tokens,
        depth=config.server.num_steps,
        trainers=settings.trainers,
        trainer_rate=settings.trainer_tokens_per_s,
        sample_rate=settings.sample_rate,
        bytes_per_token=settings.capture_bytes_per_token,
        drafter_bytes=settings.drafter_mib * _MIB,
        gate_every=settings.gate_seconds,
        swap_stall=settings.swap_stall_ms / 1e3,
        swaps_at_once=settings.swaps_at_once,
    )


def costs_of(settings: SimulateConfig) -> StepCosts:
    milliseconds = settings.base_ms, settings.request_ms, settings.node_ms, settings.level_ms, settings.draft_ms
    return StepCosts(*(value / 1e3 for value in milliseconds))


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
    lines += [f"| `simulate.{name}` | {value:g} |" for name, value in config.simulate.model_dump().items()]
    lines.append(f"| `server.num_draft_tokens`, `server.num_steps` | {config.server.num_draft_tokens}, "
                 f"{config.server.num_steps} |")  # fmt: skip
    return "\n".join(lines) + "\n"
