"""A worker refuses what cannot work before any process starts, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tiny_llama import TinyTarget, make_tiny_target

from draftloop.core.errors import CheckpointError, DraftloopError, ManifestError, ServerError
from draftloop.fleet.worker import Worker
from draftloop.trainer.day0 import make_untrained

from .conftest import CONFIG, TRAINING_PROMPTS


@pytest.fixture
def drafter(target: TinyTarget, tmp_path: Path) -> Path:
    """A sound one, to be spoilt."""
    make_untrained(target.folder, CONFIG.drafter, TRAINING_PROMPTS, tmp_path / "v0", "v0", seed=0)
    return tmp_path / "v0"


def refused(worker: Worker, drafter: Path | None, error: type[DraftloopError], message: str) -> None:
    children = psutil.Process().children()
    with pytest.raises(error, match=message) as caught:
        worker.start(drafter)
    assert "\n" not in str(caught.value)
    assert psutil.Process().children() == children
    assert worker._ring is None
    worker.stop()


def test_a_drafter_of_another_target(target: TinyTarget, drafter: Path, tmp_path: Path) -> None:
    other = make_tiny_target(tmp_path / "other", seed=5)
    worker = Worker(other.folder, CONFIG, tmp_path / "server.log")
    refused(worker, drafter, ManifestError, f"was trained for target {target.folder.name}.* not other")
    assert not (tmp_path / "server.log").exists()


def _cut(drafter: Path) -> None:
    weights = drafter / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (_cut, CheckpointError, "damaged or cut short"),
        (lambda drafter: (drafter / "model.safetensors").unlink(), CheckpointError, "has no model.safetensors"),
        (lambda drafter: (drafter / "draftloop_manifest.json").unlink(), ManifestError, "has no draftloop_manifest"),
        (lambda drafter: (drafter / "draftloop_manifest.json").write_text("{}"), ManifestError, "not a valid manifest"),
        (lambda drafter: (drafter / "config.json").write_text("["), CheckpointError, "not valid JSON"),
    ],
    ids=["a cut file", "no weights", "no manifest", "an empty manifest", "a broken config"],
)
def test_a_spoilt_drafter(
    target: TinyTarget,
    drafter: Path,
    tmp_path: Path,
    spoil: Callable[[Path], object],
    error: type[DraftloopError],
    message: str,
) -> None:
    spoil(drafter)
    refused(Worker(target.folder, CONFIG, tmp_path / "server.log"), drafter, error, message)


def test_a_plain_worker_has_nothing_to_swap_and_nothing_to_take(
    target: TinyTarget, drafter: Path, tmp_path: Path
) -> None:
    worker = Worker(target.folder, CONFIG, tmp_path / "server.log")
    with pytest.raises(ServerError, match="no drafter to swap"):
        worker.swap(drafter)
    assert worker.take(10) == []
    assert worker.counts().records == 0
