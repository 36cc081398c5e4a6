"""Writes what a run leaves: summary.json and report.html, from its results and its events."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from draftloop.cli.report import write_report
from draftloop.cli.run_events import parse_events
from draftloop.cli.run_folder import RunFolder
from draftloop.core.config import Config
from draftloop.core.events import Event, read_events
from draftloop.core.summary import (
    AcceptLength,
    BeforeAfter,
    DrafterSummary,
    RefusedSummary,
    RunStatus,
    Summary,
    SwapSummary,
    TokensPerSecond,
    Versions,
)
from draftloop.drafters.device import use_cuda

if TYPE_CHECKING:
    from draftloop.cli.demo import Results


def write_outcome(
    config: Config, folder: RunFolder, target: Path, status: RunStatus, elapsed_s: float, results: Results
) -> Path:
    """Write both files; returns the report's path."""
    events = list(read_events(folder.events))
    swaps, refused = gate_history(events)
    answers, identity = results.answers, results.identity
    day0, final = answers.get("day0"), answers.get("final")
    domains = sorted({*(day0.by_domain if day0 else ()), *(final.by_domain if final else ())})
    summary = Summary(
        status=status,
        target=target.name,
        drafter=DrafterSummary(kind=config.drafter.kind, versions=results.versions),
        device="cuda" if use_cuda(config.server.device) else "cpu",
        versions=Versions(**{name: version(name) for name in ("sglang", "torch", "transformers", "ray")}),
        seed=config.seed,
        minutes=config.demo.minutes,
        elapsed_s=elapsed_s,
        requests=results.traffic.ok,
        failed_requests=results.traffic.failed,
        tokens_captured=results.tokens_captured,
        records_dropped=results.records_dropped,
        train_steps=results.train_steps,
        swaps=swaps,
        refused=refused,
        accept_length=AcceptLength(
            day0=day0.accept_length if day0 else None,
            final=final.accept_length if final else None,
            by_domain={
                domain: BeforeAfter(
                    day0=day0.by_domain.get(domain) if day0 else None,
                    final=final.by_domain.get(domain) if final else None,
                )
                for domain in domains
            },
        ),
        tokens_per_s=TokensPerSecond(**{what: results.speed.get(what) for what in ("plain", "day0", "final")}),
        token_identical=identity.identical if identity else None,
        compared=identity.prompts if identity else 0,
        compared_tokens=identity.tokens if identity else 0,
        near_ties=list(identity.near_ties) if identity else [],
        capture_overhead=results.overhead,
        resume=None if status == "finished" else resume_command(folder),
    )
    summary.save(folder.root)
    return write_report(folder.root, summary, events)


def resume_command(folder: RunFolder) -> str:
    """What to type to go on with the newest drafter and the kept records of a run."""
    return f"draftloop demo --out {folder.root} --resume"


def gate_history(events: Iterable[Event]) -> tuple[list[SwapSummary], list[RefusedSummary]]:
    """The swaps and refusals that a run's events tell of, each with the gate's two values."""
    run = parse_events(events)
    gate = {data.version: data for data in run.promoted}
    swaps = [
        SwapSummary(
            version=swap.version,
            time_s=swap.t_s,
            gate_before=gate[swap.version].gate_before if swap.version in gate else None,
            gate_after=gate[swap.version].gate_after if swap.version in gate else None,
            stall_ms=swap.stall_ms,
            checksum_ok=swap.checksum_ok,
        )
        for swap in run.swaps
    ]
    refused = [
        RefusedSummary(
            version=data.version,
            time_s=data.t_s,
            gate_before=data.gate_before,
            gate_after=data.gate_after,
            reason=data.reason,
        )
        for data in run.refused
    ]
    return swaps, refused
