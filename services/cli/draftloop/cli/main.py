"""The `draftloop` command."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from draftloop.cli.run_folder import open_run_folder
from draftloop.core.config import Config, dump_config, load_config, save_config
from draftloop.core.errors import USER_ERROR_EXIT_CODE, DraftloopError

INTERRUPTED_EXIT_CODE = 130

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class DrafterChoice(StrEnum):
    """The drafters that the demo can refresh."""

    EAGLE3 = "eagle3"
    DFLASH = "dflash"


@app.callback()
def draftloop() -> None:
    """Keeps speculative-decoding drafters fresh from the traffic an SGLang fleet serves."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report, the checkpoints and the logs.")] = Path("runs/demo"),
    minutes: Annotated[float | None, typer.Option(help="Wall-clock budget, set-up aside.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of prompts, drafter and training.")] = None,
    drafter: Annotated[
        DrafterChoice | None, typer.Option(help="Which drafter to refresh; default: the config's, else eagle3.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL or Parquet with `messages` or `prompt`; default: built in.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A draftloop.yaml.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value, over the config; may be repeated.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the drafter and records in --out.")] = False,
) -> None:
    """Refresh a drafter from live traffic on stock SGLang and report what it gained."""
    overrides = list(override or [])
    if drafter is not None:
        overrides.append(f"drafter.kind={drafter.value}")
    if minutes is not None:
        overrides.append(f"demo.minutes={minutes}")
    if seed is not None:
        overrides.append(f"seed={seed}")
    if prompts is not None:
        overrides.append(f"traffic.prompts={prompts}")
    try:
        settings = load_config(config, overrides)
        report = _demo(settings, out, resume)
    except DraftloopError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(USER_ERROR_EXIT_CODE)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; what was done so far: {out}/report.html", err=True)
        sys.exit(INTERRUPTED_EXIT_CODE)
    typer.echo(f"report: {report}")


@app.command("config")
def print_config(
    config: Annotated[Path | None, typer.Option(help="A draftloop.yaml.")] = None,
    override: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; may be repeated.")] = None,
) -> None:
    """Print the resolved config as YAML: a start for your own draftloop.yaml."""
    try:
        typer.echo(dump_config(load_config(config, override or [])), nl=False)
    except DraftloopError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(USER_ERROR_EXIT_CODE)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Option(help="A draftloop.yaml.")] = None,
    override: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; may be repeated.")] = None,
) -> None:
    """Check packages, device, memory, disk, port, target and every hook into SGLang."""
    try:
        settings = load_config(config, override or [])
        from rich.console import Console

        from draftloop.cli.doctor import examine, show

        fine = show(examine(settings), Console())
    except DraftloopError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(USER_ERROR_EXIT_CODE)
    sys.exit(0 if fine else USER_ERROR_EXIT_CODE)


def _demo(config: Config, out: Path, resume: bool) -> Path:
    folder = open_run_folder(out, resume)
    save_config(config, folder.config)
    # Imported late: torch and Ray take seconds that bad input should not cost.
    from draftloop.cli.demo import run_demo

    return run_demo(config, folder, resume)


if __name__ == "__main__":
    app()
