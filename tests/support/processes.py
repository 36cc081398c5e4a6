"""Finds what a command started, wherever it went: every descendant inherits a mark in its environment."""

from __future__ import annotations

import uuid
from pathlib import Path

import psutil

MARK = "DRAFTLOOP_TEST_MARK"


def new_mark() -> dict[str, str]:
    """An environment variable for a command, that no other process has."""
    return {MARK: uuid.uuid4().hex}


def marked(mark: dict[str, str]) -> list[psutil.Process]:
    """All living processes with this mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark[MARK] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """Files in /dev/shm that the processes have mapped."""
    files: set[Path] = set()
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        except OSError:
            continue
        files |= {Path(line.split(maxsplit=5)[5]) for line in lines if " /dev/shm/" in line}
    return {file for file in files if not file.name.endswith("(deleted)")}
