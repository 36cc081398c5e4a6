"""What a Ray call raised, as the one line behind it."""

from __future__ import annotations

from ray.exceptions import RayActorError, RayTaskError

from draftloop.core.errors import DraftloopError, ServerError


def plain_error(error: BaseException) -> DraftloopError | None:
    """The one-line error behind what a Ray call raised, or None for a fault of our own."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, DraftloopError):
        return error.cause
    if isinstance(error, DraftloopError):
        return error
    if isinstance(error, RayActorError):
        return ServerError(f"a Ray actor died: {' '.join(str(error).split())[:200]}")
    return None


def one_line(error: BaseException) -> str:
    """The error's own words in one line, without Ray's traceback."""
    return " ".join(str(plain_error(error) or error).split())[:400]
