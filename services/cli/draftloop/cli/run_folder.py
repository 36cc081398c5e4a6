"""The folder of one run: what lies where, and that it can be written before anything starts."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draftloop.capture.journal import JOURNAL_FOLDER
from draftloop.core.errors import DraftloopError
from draftloop.core.summary import SUMMARY_FILE

NEEDED_BYTES = 1 << 30


@dataclass(frozen=True)
class RunFolder:
    """events.jsonl, config.yaml, summary.json, report.html, checkpoints/vN, journal, the trainer's state, the
    servers' logs."""

    root: Path

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.root / JOURNAL_FOLDER

    def log(self, server: str) -> Path:
        return self.root / f"server-{server}.log"

    def newest_checkpoint(self) -> Path | None:
        """The checkpoint with the highest version number."""
        folders = [folder for folder in self.checkpoints.glob("v*") if folder.name[1:].isdigit()]
        return max(folders, key=lambda folder: int(folder.name[1:]), default=None)


@contextlib.contextmanager
def locked(folder: RunFolder) -> Iterator[int]:
    """One controller a folder; the lock's descriptor. Raises DraftloopError when another has it.

    The kernel frees it when the last process with the descriptor dies.
    """
    folder.root.mkdir(parents=True, exist_ok=True)
    with (folder.root / "controller.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DraftloopError(
                f"another controller runs in {folder.root}: see draftloop status, or choose another folder with --out"
            ) from None
        yield file.fileno()


def open_run_folder(root: Path, resume: bool) -> RunFolder:
    """Make the folder ready. An earlier run's is moved aside, never overwritten, unless it is resumed.

    Raises DraftloopError in one line when it cannot be written, the disk is full, or there is nothing to resume.
    """
    folder = RunFolder(root)
    try:
        if resume:
            if folder.newest_checkpoint() is None:
                raise DraftloopError(f"{root} holds no checkpoint to resume from: start without --resume")
        elif (root / SUMMARY_FILE).exists() or folder.events.exists():
            root.rename(root.with_name(f"{root.name}.{time.strftime('%Y%m%d-%H%M%S')}"))
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
        free = shutil.disk_usage(root).free
    except OSError as err:
        raise DraftloopError(f"cannot write to {root}: {err.strerror}; choose another folder with --out") from None
    if free < NEEDED_BYTES:
        raise DraftloopError(
            f"only {free >> 20} MiB are free for {root} and a run needs about {NEEDED_BYTES >> 20}: free some space "
            "or choose another folder with --out"
        )
    return folder
