"""One SGLang server process: how it is started on a CPU or a GPU, waited for, and stopped with its children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import draftloop.sglang.cpu
from draftloop.core.config import Config, ServerConfig, TargetConfig
from draftloop.core.errors import ServerError
from draftloop.core.manifest import DrafterKind
from draftloop.drafters.checkpoint import read_hf_config
from draftloop.drafters.device import serving_dtype, use_cuda
from draftloop.drafters.dflash import DflashConfig
from draftloop.drafters.load.shapes import block_shapes, tree_shapes
from draftloop.sglang.algorithms import ALGORITHMS, Algorithm
from draftloop.sglang.client import ServerClient
from draftloop.sglang.load.settings import LOAD_ENV, LoadSettings
from draftloop.sglang.platform import PLATFORM_NAME
from draftloop.sglang.swap_loader import LOADER
from draftloop.sglang.tap import TAP_ENV, TapSettings

STANDIN = Path(draftloop.sglang.cpu.__file__).parent / "standin"
# Naming any package here keeps SGLang from importing every model file at once; `cpu.fast_start` brings the one.
EXTERNAL_MODELS = "draftloop.sglang.cpu.no_models"
_PR_SET_PDEATHSIG = 1
_LOG_TAIL_BYTES = 65536
STOP_TIMEOUT_S = 8.0
# Shared memory that SGLang leaves behind when it is ended by a signal; the names are random.
_LEFT_BEHIND = (" /dev/shm/sglang_loads_", " /dev/shm/sem.mp-")


@dataclass(frozen=True, slots=True)
class Speculation:
    """The drafter a server is born with. None of it in a server for plain decoding."""

    checkpoint: Path
    version: str
    kind: DrafterKind = "eagle3"

    @property
    def algorithm(self) -> Algorithm:
        return ALGORITHMS[self.kind]


def free_port(host: str, wanted: int | None, setting: str = "server.port") -> int:
    """`wanted` if it can be bound, any free port for None. Raises ServerError that names the config's `setting`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted or 0))
        except OSError as err:
            raise ServerError(
                f"port {wanted} on {host} cannot be used ({err.strerror}): choose another with {setting}"
            ) from None
        port: int = probe.getsockname()[1]
        return port


def server_command(
    target: Path, target_config: TargetConfig, config: ServerConfig, port: int, speculation: Speculation | None
) -> list[str]:
    """The stock server's command line."""
    cuda = use_cuda(config.device)
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(target)]
    options: dict[str, object] = {
        "host": config.host,
        "port": port,
        "device": "cuda" if cuda else "cpu",
        "dtype": str(serving_dtype(target_config.dtype, cuda)).removeprefix("torch."),
        "context-length": target_config.context_length,
        "max-total-tokens": config.max_total_tokens,
        "max-running-requests": config.max_running_requests,
        "chunked-prefill-size": config.chunked_prefill_size,
        "attention-backend": config.attention if cuda else "draftloop_torch",
        "custom-weight-loader": LOADER,
        "log-level": "warning",
    }
    if not cuda:
        options |= {"cuda-graph-backend-decode": "disabled", "cuda-graph-backend-prefill": "disabled"}
    if cuda and config.mem_fraction is not None:
        options["mem-fraction-static"] = config.mem_fraction
    if speculation is not None:
        if cuda:  # ours is for the target's verification only
            own = config.attention == "draftloop_flashinfer"
            options["speculative-draft-attention-backend"] = "flashinfer" if own else config.attention
        options |= {
            "speculative-algorithm": speculation.algorithm,
            "speculative-draft-model-path": speculation.checkpoint,
            "weight-version": speculation.version,
        }
        if speculation.algorithm != "DFLASH":  # DFlash drafts one block, whose size its checkpoint tells
            options |= {
                "speculative-num-steps": config.num_steps,
                "speculative-eagle-topk": config.topk,
                "speculative-num-draft-tokens": config.num_draft_tokens,
            }
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    return command


def server_threads(config: Config) -> int:
    """CPU threads of a server. Its threads wait for each other many times a step, so a trainer on one of their cores
    stalls them all (2 cores, seen: 37 -> 9 tokens/s); each gets cores of its own instead."""
    if config.server.threads is not None:
        return config.server.threads
    if config.fleet.cpus_per_worker >= 1:
        return int(config.fleet.cpus_per_worker)
    cores = os.cpu_count() or 1
    training = config.trainer.threads * config.trainer.processes
    return cores if use_cuda(config.trainer.device) else max(1, cores - training)


def load_settings(config: Config, speculation: Speculation, folder: Path) -> LoadSettings:
    """What a server may run, and whether it follows its load or keeps the largest shape.

    Only an eager server (on a CPU) runs Python every step; a chain has no confidences in SGLang.
    """
    server = config.server
    chain = speculation.algorithm != "DFLASH" and server.topk == 1
    drafter = read_hf_config(speculation.checkpoint)
    if isinstance(drafter, DflashConfig):
        shapes = block_shapes(drafter.block_size)
    else:
        shapes = tree_shapes(server.num_steps, server.topk, server.num_draft_tokens)
    return LoadSettings(
        folder=folder,
        algorithm=speculation.algorithm,
        shapes=shapes,
        follow=config.speculation.follow_load and not use_cuda(server.device) and not chain,
        margin=config.speculation.margin,
    )


def server_environment(config: Config, tap: TapSettings | None, load: LoadSettings | None = None) -> dict[str, str]:
    """The environment of a server process: platform, threads, tap, load. Ours is otherwise passed on."""
    environment = dict(os.environ)
    # A model or tokenizer is always a local folder here; a look-up at a hub would only cost a time-out.
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not use_cuda(config.server.device):
        environment |= {
            "SGLANG_PLATFORM": PLATFORM_NAME,
            "SGLANG_EXTERNAL_MODEL_PACKAGE": EXTERNAL_MODELS,
            "SGLANG_USE_CPU_ENGINE": "1",
            # SGLang compiles a few helpers; on a CPU that costs seconds, and a C++ compiler not every machine has.
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": str(server_threads(config)),
            # Threads wait for their partner by spinning for some 20 us, then sleep: sleeping at once costs a step a
            # quarter of its time in wake-ups, spinning for long takes the core a trainer beside it needs.
            "GOMP_SPINCOUNT": "10000",
            # Torch allocates big tensors in huge pages: streaming the weights misses the TLB less.
            "THP_MEM_ALLOC_ENABLE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(STANDIN), environment.get("PYTHONPATH")])),
        }
    if tap is not None:
        environment[TAP_ENV] = tap.model_dump_json()
    if load is not None:
        environment[LOAD_ENV] = load.model_dump_json()
    if load is not None and load.follow:
        # SGLang's zero-step mode then leaves the drafter out altogether; we let it catch up.
        environment["SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"] = "1"
    return environment


class ServerProcess:
    """Start, wait, stop. The whole process group goes when `stop` is called or this process dies."""

    def __init__(self, command: list[str], environment: dict[str, str], base_url: str, log: Path) -> None:
        self.base_url = base_url
        self.log = log
        self._shared_memory: set[Path] = set()
        libc = ctypes.CDLL(None)

        def die_with_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float) -> None:
        """Return when the server answers. Raises ServerError with the reason from its log."""
        deadline = time.monotonic() + timeout_s
        with ServerClient(self.base_url) as client:
            while not client.healthy():
                if not self.alive:
                    raise ServerError(f"the SGLang server did not start: {self.why_it_died()} (log: {self.log})")
                if time.monotonic() > deadline:
                    self.stop()
                    raise ServerError(
                        f"the SGLang server was not ready within {timeout_s:.0f} s: raise server.start_timeout_s, "
                        f"or see {self.log}"
                    )
                time.sleep(0.25)
        self._note_shared_memory()

    def _note_shared_memory(self) -> None:
        """Remember what the group has mapped, for `stop`: of a dead process it can no longer be told."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.getpgid(int(folder.name)) == self._process.pid:
                    lines = (folder / "maps").read_text().splitlines()
                    found = [line for line in lines if any(name in line for name in _LEFT_BEHIND)]
                    self._shared_memory |= {Path(line.split(maxsplit=5)[5]) for line in found}

    def why_it_died(self) -> str:
        """The most telling line of the log: ours, else the last error."""
        with self.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        for line in lines:
            if line.startswith("draftloop: "):
                return line.removeprefix("draftloop: ")
        errors = [line.strip() for line in lines if "Error" in line and not line.startswith(" ")]
        return errors[-1] if errors else f"exit code {self._process.returncode}"

    def stop(self) -> None:
        """End the server and its children; returns when they and their shared memory are gone.

        Asked first, so that Python's resource trackers among them can take their semaphores along.
        """
        self._note_shared_memory()
        group = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while time.monotonic() < deadline:
                self._process.poll()  # a dead leader would count as a member until it is reaped
                os.killpg(group, 0)
                time.sleep(0.05)
            os.killpg(group, signal.SIGKILL)
        self._process.wait()
        for file in self._shared_memory:
            file.unlink(missing_ok=True)
