"""The `draftloop` command."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from draftloop.cli.data_commands import add_data_commands
from draftloop.cli.options import FLEET_FOLDER, ConfigOption, SetOption, user_errors
from draftloop.cli.run_folder import open_run_folder
from draftloop.core.config import Config, dump_config, load_config, save_config
from draftloop.core.errors import USER_ERROR_EXIT_CODE
from draftloop.core.summary import write_atomic
from draftloop.generator.prompts import load_prompts

INTERRUPTED_EXIT_CODE = 130

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
add_data_commands(app)


OutOption = Annotated[Path, typer.Option(help="The run's folder: state, checkpoints, logs, control token.")]


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
    config: ConfigOption = None,
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
        with user_errors():
            report = _demo(load_config(config, overrides), out, resume)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; what was done so far: {out}/report.html", err=True)
        sys.exit(INTERRUPTED_EXIT_CODE)
    typer.echo(f"report: {report}")


@app.command()
def refresh(
    config: ConfigOption = None,
    out: OutOption = FLEET_FOLDER,
    override: SetOption = None,
) -> None:
    """Serve a fleet behind its router and keep its drafter fresh, until it is stopped.

    Uses the Ray cluster that RAY_ADDRESS names (`ray job submit` sets it), else a local one. Goes on where an earlier
    controller of the same folder ended.
    """
    _fleet(config, override, out, train=True, router=None)


@app.command()
def serve(config: ConfigOption = None, out: OutOption = FLEET_FOLDER, override: SetOption = None) -> None:
    """Serve a fleet behind its router, without training."""
    _fleet(config, override, out, train=False, router=None)


@app.command()
def attach(
    router: Annotated[str, typer.Option(help="URL of the router whose servers are refreshed.")],
    config: ConfigOption = None,
    out: OutOption = FLEET_FOLDER,
    override: SetOption = None,
) -> None:
    """Refresh the drafter of a fleet that something else started with draftloop's plugin, on this machine."""
    _fleet(config, override, out, train=True, router=router)


@app.command("new-drafter")
def new_drafter(
    folder: Annotated[Path, typer.Argument(help="Where the checkpoint goes; its name is the version.")],
    published: Annotated[
        Path | None, typer.Option(help="EAGLE-3 or DFlash as published by others (also `speculators`).")
    ] = None,
    config: ConfigOption = None,
    override: SetOption = None,
) -> None:
    """Make a drafter to begin with: untrained, or from one that others have published for the same target."""
    with user_errors():
        settings = load_config(config, override or [])
        from draftloop.cli.new_drafter import from_published, untrained
        from draftloop.sglang.target import resolve_target

        target, place = resolve_target(settings.target.path).resolve(), folder.resolve()
        made = untrained(settings, target, place) if published is None else from_published(published, target, place)
    typer.echo(f"{folder}: {made.kind}, target layers {list(made.layer_ids)}")


@app.command("server-command")
def print_server_command(
    drafter: Annotated[Path, typer.Option(help="The checkpoint folder that the server is born with.")],
    reports: Annotated[Path, typer.Option(help="Folder for what the server says of its steps.")] = Path("runs/servers"),
    config: ConfigOption = None,
    override: SetOption = None,
) -> None:
    """Print the line that starts a server which `draftloop attach` can refresh."""
    with user_errors():
        settings = load_config(config, override or [])
        from draftloop.cli.server_command import server_line

        typer.echo(server_line(settings, drafter, reports))


@app.command()
def status(out: OutOption = FLEET_FOLDER, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Show the fleet: workers, versions, the roll-out, where the captured records are."""
    answer = _ask(out, "status", None)
    if as_json:
        typer.echo(json.dumps(answer))
        return
    from draftloop.cli.fleet_view import show_status

    show_status(answer)


@app.command()
def stop(out: OutOption = FLEET_FOLDER, heir_of: Annotated[int | None, typer.Option(hidden=True)] = None) -> None:
    """End a fleet: its controller, and the servers that a killed one left in a Ray cluster."""
    with user_errors():
        from draftloop.cli.stop import inherit, stop_fleet

        root = out.resolve()
        left = stop_fleet(root) if heir_of is None else inherit(root, heir_of)
    typer.echo(f"stopped{', with what a killed controller had left: ' if left else ''}{', '.join(left)}")


@app.command()
def scale(workers: Annotated[int, typer.Argument()], out: OutOption = FLEET_FOLDER) -> None:
    """Serve with so many workers."""
    _ask(out, "scale", {"workers": workers})


@app.command()
def rollback(version: Annotated[str, typer.Argument()], out: OutOption = FLEET_FOLDER) -> None:
    """Put an earlier version back into every server."""
    _ask(out, "rollback", {"version": version})


@app.command()
def promote(checkpoint: Annotated[Path, typer.Argument()], out: OutOption = FLEET_FOLDER) -> None:
    """Try a drafter that was trained elsewhere: on a canary first, then everywhere."""
    answer = _ask(out, "promote", {"checkpoint": str(checkpoint.resolve())})
    typer.echo(f"{answer['version']} goes to a canary first: see draftloop status")


@app.command("config")
def print_config(
    config: ConfigOption = None,
    override: SetOption = None,
) -> None:
    """Print the resolved config as YAML: a start for your own draftloop.yaml."""
    with user_errors():
        typer.echo(dump_config(load_config(config, override or [])), nl=False)


@app.command()
def simulate(
    workers: Annotated[list[int] | None, typer.Option(help="Fleet size; may be repeated; default 8, 64, 1000.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the simulated answers' lengths.")] = 0,
    markdown: Annotated[Path | None, typer.Option(help="Write the table and its assumptions to this file.")] = None,
    config: Annotated[Path | None, typer.Option(help="A draftloop.yaml; its `simulate` section is the fleet.")] = None,
    override: SetOption = None,
) -> None:
    """Predict what refreshing would bring a fleet: speed-up, break-even, network load."""
    with user_errors():
        settings = load_config(config, override or [])
        from draftloop.cli.simulate import as_markdown, simulate_fleets

        rows = simulate_fleets(settings, workers or [8, 64, 1000], seed)
        text = as_markdown(settings, rows, seed)
        typer.echo(text, nl=False)
        if markdown is not None:
            write_atomic(markdown, text)


@app.command()
def plan(
    config: ConfigOption = None,
    override: SetOption = None,
) -> None:
    """Say what a config puts on each GPU and whether it fits, before anything starts."""
    with user_errors():
        settings = load_config(config, override or [])
        from rich.console import Console

        from draftloop.cli.plan import plan_cards, show

        fits = show(plan_cards(settings), settings, Console())
    sys.exit(0 if fits else USER_ERROR_EXIT_CODE)


@app.command()
def doctor(
    config: ConfigOption = None,
    override: SetOption = None,
) -> None:
    """Check packages, device, memory, disk, port, target and every hook into SGLang."""
    with user_errors():
        settings = load_config(config, override or [])
        from rich.console import Console

        from draftloop.cli.doctor import examine, show

        fine = show(examine(settings), Console())
    sys.exit(0 if fine else USER_ERROR_EXIT_CODE)


def _fleet(config: Path | None, overrides: list[str] | None, out: Path, *, train: bool, router: str | None) -> None:
    try:
        with user_errors():
            settings = load_config(config, overrides or [])
            from draftloop.cli.fleet import run_fleet

            run_fleet(settings, out.resolve(), train, router)
    except KeyboardInterrupt:  # before or after the fleet ran; what ran is gone
        sys.exit(INTERRUPTED_EXIT_CODE)
    typer.echo("stopped; start the same command again to go on")


def _ask(out: Path, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    from draftloop.refresher.control import call_controller

    with user_errors():
        return call_controller(out, path, body)


def _demo(config: Config, out: Path, resume: bool) -> Path:
    folder = open_run_folder(out, resume)
    save_config(config, folder.config)
    load_prompts(config.traffic.prompts)
    # Imported late: torch and Ray take seconds that bad input should not cost.
    from draftloop.cli.demo import run_demo

    return run_demo(config, folder, resume)


if __name__ == "__main__":
    app()
