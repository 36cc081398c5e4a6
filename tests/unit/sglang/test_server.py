"""How a server process is started, waited for and stopped, with real processes in SGLang's place."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psutil
import pytest

from draftloop.core.config import Config, ServerConfig, TargetConfig
from draftloop.core.errors import ServerError
from draftloop.sglang.platform import PLATFORM_NAME, activate
from draftloop.sglang.server import (
    STANDIN,
    ServerProcess,
    Speculation,
    free_port,
    server_command,
    server_environment,
)
from draftloop.sglang.tap import TAP_ENV, TapSettings

CPU = ServerConfig(device="cpu", threads=3)
NO_SERVER = "http://127.0.0.1:9"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def options(command: list[str]) -> dict[str, str]:
    """--name value pairs after `python -m sglang.launch_server`."""
    assert command[1:3] == ["-m", "sglang.launch_server"]
    names, values = command[3::2], command[4::2]
    assert all(name.startswith("--") for name in names)
    return dict(zip(names, values, strict=True))


def gone(pid: int, within_s: float = 10.0) -> bool:
    """Whether the process ends (a zombie has ended) in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_a_taken_port_is_one_line_that_names_the_remedy(taken: int) -> None:
    with pytest.raises(ServerError) as caught:
        free_port("127.0.0.1", taken)
    message = str(caught.value)
    assert f"port {taken} on 127.0.0.1" in message
    assert "server.port" in message
    assert "\n" not in message


def test_free_ports_can_be_bound() -> None:
    port = free_port("127.0.0.1", None)
    assert free_port("127.0.0.1", port) == port
    with pytest.raises(ServerError, match=r"999\.0\.0\.1"):
        free_port("999.0.0.1", None)


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_a_backend_of_sglang_serves_target_and_draft(backend: Literal["flashinfer", "triton"]) -> None:
    config = ServerConfig(device="cuda", attention=backend)
    found = options(server_command(Path("/models/t"), TargetConfig(), config, 1, Speculation(Path("/d/v7"), "v7")))
    assert found["--attention-backend"] == found["--speculative-draft-attention-backend"] == backend


def test_the_command_of_a_speculative_gpu_server() -> None:
    """Our backend is the target's; the draft keeps SGLang's. CUDA graphs stay on."""
    config = ServerConfig(device="cuda", mem_fraction=0.5, attention="draftloop_flashinfer")
    found = options(server_command(Path("/models/t"), TargetConfig(), config, 1, Speculation(Path("/d/v7"), "v7")))
    assert (
        found.items()
        >= {
            "--device": "cuda",
            "--dtype": "bfloat16",
            "--mem-fraction-static": "0.5",
            "--attention-backend": "draftloop_flashinfer",
            "--speculative-draft-attention-backend": "flashinfer",
        }.items()
    )
    assert not any("cuda-graph" in name for name in found)
    assert "SGLANG_PLATFORM" not in server_environment(Config(server=config), None)


def test_the_command_of_a_speculative_cpu_server() -> None:
    config = ServerConfig(
        device="cpu",
        num_steps=5,
        topk=2,
        num_draft_tokens=6,
        max_running_requests=3,
        max_total_tokens=2048,
        chunked_prefill_size=128,
    )
    command = server_command(
        Path("/models/t"), TargetConfig(context_length=256), config, 4321, Speculation(Path("/d/v7"), "v7")
    )
    assert command[0] == sys.executable
    assert (
        options(command).items()
        >= {
            "--model-path": "/models/t",
            "--port": "4321",
            "--host": "127.0.0.1",
            "--device": "cpu",
            "--dtype": "float32",
            "--context-length": "256",
            "--max-running-requests": "3",
            "--max-total-tokens": "2048",
            "--chunked-prefill-size": "128",
            "--attention-backend": "draftloop_torch",
            "--cuda-graph-backend-decode": "disabled",
            "--speculative-algorithm": "EAGLE3",
            "--speculative-draft-model-path": "/d/v7",
            "--speculative-num-steps": "5",
            "--speculative-eagle-topk": "2",
            "--speculative-num-draft-tokens": "6",
            "--weight-version": "v7",
        }.items()
    )


def test_a_plain_server_has_no_trace_of_speculation() -> None:
    plain = options(server_command(Path("/m"), TargetConfig(), CPU, 1, None))
    assert not [name for name in plain if "speculative" in name or "version" in name]


def test_the_command_of_a_gpu_server() -> None:
    gpu = options(server_command(Path("/m"), TargetConfig(), ServerConfig(device="cuda"), 1, None))
    assert (gpu["--device"], gpu["--dtype"], gpu["--attention-backend"]) == ("cuda", "bfloat16", "flashinfer")
    assert not [name for name in gpu if "cuda-graph" in name]


def test_the_environment_of_a_cpu_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("A_USERS_OWN", "kept")
    tap = TapSettings(ring="ring-1", top_logits=4)
    environment = server_environment(Config(server=CPU), tap)
    assert environment["SGLANG_PLATFORM"] == PLATFORM_NAME
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["PYTHONPATH"] == f"{STANDIN}:/mine"
    assert environment["A_USERS_OWN"] == "kept"
    assert TapSettings.model_validate_json(environment[TAP_ENV]) == tap
    assert TAP_ENV not in server_environment(Config(server=CPU), None)


def test_the_environment_of_a_gpu_server_leaves_sglangs_own_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    environment = server_environment(Config(server=ServerConfig(device="cuda")), None)
    assert not {"SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS"} & environment.keys()
    assert str(STANDIN) not in environment.get("PYTHONPATH", "")
    assert activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", PLATFORM_NAME)
    assert activate() == "draftloop.sglang.cpu.platform.DraftloopCpuPlatform"


def run_python(code: str, log: Path) -> ServerProcess:
    return ServerProcess([sys.executable, "-c", code], server_environment(Config(server=CPU), None), NO_SERVER, log)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit(3)", "exit code 3"),
        ("raise RuntimeError('no room for the KV cache')", "RuntimeError: no room for the KV cache"),
        (
            "import sys; print('draftloop: hook X does not exist', file=sys.stderr); raise ValueError('later')",
            "hook X does not exist",
        ),
    ],
)
def test_a_server_that_ends_at_once_says_why(tmp_path: Path, code: str, reason: str) -> None:
    log = tmp_path / "logs" / "server.log"
    process = run_python(code, log)
    with pytest.raises(ServerError) as caught:
        process.wait_ready(60)
    message = str(caught.value)
    assert reason in message
    assert str(log) in message
    assert "\n" not in message
    assert not process.alive
    process.stop()
    process.stop()


# A server that answers nothing, ignores SIGTERM, and has a child that does too.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""


def child_of(log: Path) -> int:
    """The pid that STUBBORN printed, once its child ignores SIGTERM too."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        words = log.read_text().split()
        if "ready" in words and "child" in words:
            return int(words[words.index("child") + 1])
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def test_a_server_that_never_answers_is_stopped_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    process = run_python(STUBBORN, log)
    child = child_of(log)
    assert psutil.pid_exists(child)
    with pytest.raises(ServerError, match=r"not ready within 1 s: raise server\.start_timeout_s"):
        process.wait_ready(1.0)
    assert not process.alive
    assert gone(child)


def test_a_server_does_not_outlive_the_process_that_started_it(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    code = (
        "import os, sys, time; from pathlib import Path; from draftloop.sglang.server import ServerProcess\n"
        f"process = ServerProcess([sys.executable, '-c', 'import time; time.sleep(600)'], dict(os.environ), "
        f"{NO_SERVER!r}, Path({str(log)!r}))\n"
        "print(process._process.pid, flush=True); os._exit(9)"
    )
    starter = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert starter.returncode == 9, starter.stderr
    assert gone(int(starter.stdout))
