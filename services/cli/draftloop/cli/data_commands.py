"""The commands about a run's data: versions, record, replay, delete."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from draftloop.cli.options import FLEET_FOLDER, SetOption, user_errors
from draftloop.core.config import load_config, save_config
from draftloop.core.errors import ConfigError

# The modules behind the commands are imported late: numpy and torch take seconds that bad input should not cost.

RunOption = Annotated[Path, typer.Option("--out", help="The run's folder.")]


def add_data_commands(app: typer.Typer) -> None:
    """Put the commands of this module under `draftloop`."""
    versions = typer.Typer(invoke_without_command=True)
    versions.callback()(show)
    versions.command("diff")(diff)
    app.add_typer(versions, name="versions")
    app.command()(record)
    app.command()(replay)
    app.command()(delete)


def show(context: typer.Context, out: RunOption = FLEET_FOLDER) -> None:
    """List a run's drafters: parent, state, the data they learnt from, the gate's figure."""
    if context.invoked_subcommand is None:
        from draftloop.cli.versions import show_versions

        with user_errors():
            show_versions(out, Console())


def diff(one: str, other: str, out: RunOption = FLEET_FOLDER) -> None:
    """Show what differs between two versions."""
    from draftloop.cli.versions import show_difference

    with user_errors():
        show_difference(out, one, other, Console())


def record(
    file: Path,
    out: RunOption = FLEET_FOLDER,
    minutes: Annotated[float, typer.Option(help="How far back from the newest record.")] = 60.0,
) -> None:
    """Save a stretch of captured traffic (token ids and states) to a file, also while the run goes on."""
    from draftloop.cli.data import record as save

    with user_errors():
        typer.echo(f"{file}: {save(out, file, minutes)}")


def replay(
    file: Path,
    drafter: Annotated[Path, typer.Option(help="Checkpoint that the refresh begins with.")],
    out: Annotated[Path, typer.Option(help="New folder for the versions.")] = Path("runs/replay"),
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps between two tries of the gate.")] = 100,
    config: Annotated[Path | None, typer.Option(help="A draftloop.yaml; a run keeps its own as config.yaml.")] = None,
    override: SetOption = None,
) -> None:
    """Refresh a drafter from recorded traffic, with no server: the same file and seed give the same versions."""
    from draftloop.cli.data import replay as refresh

    with user_errors():
        settings = load_config(config, override or [])
        for line in refresh(settings, file, drafter, out, steps):
            typer.echo(line)
        save_config(settings, out / "config.yaml")


def delete(
    out: RunOption = FLEET_FOLDER,
    request_id: Annotated[str | None, typer.Option(help="Forget this request.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Forget all that this tenant has sent so far.")] = None,
) -> None:
    """Erase a request's or a tenant's records, and mark the versions that learnt from them."""
    from draftloop.cli.data import delete as forget

    with user_errors():
        if (request_id is None) == (tenant is None):
            raise ConfigError("give --request-id or --tenant, one of them")
        said = forget(out, "request", request_id) if request_id is not None else forget(out, "tenant", str(tenant))
        for line in said:
            typer.echo(line)
