"""`draftloop doctor`: what of this machine and its packages a run needs, as one table."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table

from draftloop.cli.plan import plan_cards
from draftloop.cli.run_folder import NEEDED_BYTES
from draftloop.core.config import Config
from draftloop.core.errors import DraftloopError
from draftloop.drafters.device import use_cuda
from draftloop.sglang.doctor import hook_states
from draftloop.sglang.hooks import TESTED_VERSIONS
from draftloop.sglang.server import free_port
from draftloop.sglang.target import resolve_target

NEEDED_MEMORY = 8 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table. ok None: information, neither good nor bad."""

    what: str
    ok: bool | None
    detail: str


def examine(config: Config) -> list[Finding]:
    """All findings, in the table's order; a check that fails with one of our errors is a finding too."""
    checks: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("packages", _packages),
        ("device", lambda: [_device(config)]),
        ("compiler", lambda: [compiler()] if use_cuda(config.server.device) else []),
        ("memory", lambda: [_memory()]),
        ("disk", lambda: [_disk(Path.cwd())]),
        ("port", lambda: [_port(config)]),
        ("target", lambda: [Finding("target", True, str(resolve_target(config.target.path)))]),
        ("plan", lambda: _plan(config)),
        ("hooks", lambda: _hooks(config)),
    ]
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings += check()
        except DraftloopError as error:
            findings.append(Finding(name, False, str(error)))
    return findings


def _packages() -> list[Finding]:
    found = []
    for name in ("sglang", "torch", "transformers", "flashinfer-python", "ray", "datasets", "sglang-router"):
        try:
            installed = version(name)
        except PackageNotFoundError:
            found.append(Finding(name, False, "not installed: run `make setup`"))
            continue
        tested = name != "sglang" or installed in TESTED_VERSIONS
        advice = "" if tested else f": not tested, use {TESTED_VERSIONS[0]}"
        found.append(Finding(name, tested, installed + advice))
    return found


def _device(config: Config) -> Finding:
    if not use_cuda(config.server.device):
        return Finding("device", True, f"CPU, {torch.get_num_threads()} threads, no GPU in use")
    if not torch.cuda.is_available():
        return Finding("device", False, "server.device is cuda and torch sees no GPU: use auto or cpu")
    properties = torch.cuda.get_device_properties(0)
    return Finding("device", True, f"{properties.name}, {properties.total_memory >> 30} GiB, FlashInfer attention")


def compiler() -> Finding:
    """FlashInfer compiles its kernels at first use, with the first nvcc that it finds in these places."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = Path(home) / "bin/nvcc" if home else Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    if found.is_file():
        return Finding("compiler", True, str(found))
    return Finding("compiler", False, f"no {found}: FlashInfer needs a CUDA toolkit, set CUDA_HOME to torch's version")


def _memory() -> Finding:
    free = psutil.virtual_memory().available
    return Finding("memory", free >= NEEDED_MEMORY, f"{free >> 30} GiB available, a demo needs {NEEDED_MEMORY >> 30}")


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    return Finding("disk", free >= NEEDED_BYTES, f"{free >> 30} GiB free in {folder}")


def _port(config: Config) -> Finding:
    port = free_port(config.server.host, config.server.port)
    return Finding("port", True, f"{config.server.host}:{port} is free")


def _plan(config: Config) -> list[Finding]:
    """What `draftloop plan` says of each GPU; nothing for a CPU."""
    if not use_cuda(config.server.device) and config.hardware.card_gib is None:
        return []
    return [
        Finding(f"card {plan.card}", plan.problem is None, plan.problem or f"{plan.total:.1f} of {plan.gib:.1f} GiB")
        for plan in plan_cards(config)
    ]


def _hooks(config: Config) -> list[Finding]:
    return [
        Finding("hook", state.problem is None, f"{state.target} {state.problem or ''}".strip())
        for state in hook_states(config)
    ]


def show(findings: list[Finding], console: Console) -> bool:
    """Print the table; True when nothing is wrong."""
    table = Table("", "what", "found", show_header=True, box=None)
    for finding in findings:
        mark = {True: "[green]ok[/]", False: "[red]no[/]", None: ""}[finding.ok]
        table.add_row(mark, finding.what, finding.detail)
    console.print(table)
    return all(finding.ok is not False for finding in findings)
