"""What the commands share: options, and how a user's error ends one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from draftloop.core.errors import USER_ERROR_EXIT_CODE, DraftloopError

FLEET_FOLDER = Path("runs/fleet")
ConfigOption = Annotated[Path | None, typer.Option(help="A draftloop.yaml.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="section.key=value; may be repeated.")]


@contextmanager
def user_errors() -> Iterator[None]:
    """A DraftloopError becomes its one line on stderr and exit code 2."""
    try:
        yield
    except DraftloopError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(USER_ERROR_EXIT_CODE)
