"""`draftloop demo` as a user runs it: the whole loop to the end, cut by Ctrl-C, and every kind of bad input.

The target is a tiny random Llama, so that a run takes minutes; everything else is what a user gets: real Ray, two real
SGLang servers one after the other, real training, real swaps.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from device import DEVICE
from processes import marked, new_mark, shared_memory
from tiny_llama import TinyTarget, make_tiny_target

from draftloop.capture.journal import read_counts
from draftloop.core.config import load_config
from draftloop.core.events import Event, read_events
from draftloop.core.manifest import Manifest
from draftloop.core.summary import Summary
from draftloop.core.versions import VersionRegistry
from draftloop.drafters.target import target_identity
from draftloop.trainer.day0 import make_untrained

COMMAND = [sys.executable, "-m", "draftloop.cli.main", "demo"]
QUICK_S = 180.0
HELDOUT_PROMPTS, HELDOUT_TOKENS = 8, 16


@dataclass(frozen=True)
class Setting:
    """What all runs share: a config file and a prompt file."""

    config: Path
    prompts: Path

    def command(self, out: Path, *more: str) -> list[str]:
        return [*COMMAND, "--config", str(self.config), "--prompts", str(self.prompts), "--out", str(out), *more]


@pytest.fixture(scope="module")
def setting(target: TinyTarget, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("loop")
    config = {
        "target": {"path": str(target.folder), "context_length": 1024},
        "drafter": {"draft_vocab_size": 256},
        "server": {
            "device": DEVICE,
            "max_running_requests": 8,
            "max_total_tokens": 8192,
            "chunked_prefill_size": 64,
            "start_timeout_s": 420,
        },
        "capture": {"ring_mib": 8, "holdout_fraction": 0.3},
        "trainer": {"device": DEVICE, "batch_tokens": 256, "learning_rate": 3e-3},
        # A negative gain: on a slow machine the few steps of a short run need not have won anything yet.
        "gate": {"every_seconds": 4, "min_records": 2, "min_gain": -0.5, "domain_floor": 0.9, "max_eval_tokens": 1024},
        "traffic": {"concurrency": 4, "max_new_tokens": 24},
        "demo": {
            "heldout_prompts": HELDOUT_PROMPTS,
            "heldout_tokens": HELDOUT_TOKENS,
            "speed_prompts": 2,
            "overhead_pairs": 1,
        },
    }
    (folder / "draftloop.yaml").write_text(yaml.safe_dump(config))
    rng = random.Random(4)
    rows = [
        {"domain": ("chat", "code")[i % 2], "prompt": " ".join(rng.choices(["bado", "kiru", "molan", "fe", "so"], k=6))}
        for i in range(40)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Setting(folder / "draftloop.yaml", folder / "prompts.jsonl")


def report_is_whole(out: Path) -> bool:
    text = (out / "report.html").read_text()
    return text.lstrip().lower().startswith("<!doctype html") and text.rstrip().endswith("</html>")


def events_of(out: Path, kind: str) -> list[Event]:
    path = out / "events.jsonl"
    return [event for event in read_events(path) if event.kind == kind] if path.exists() else []


def assert_all_gone(mark: dict[str, str], shm: set[Path]) -> None:
    _, alive = psutil.wait_procs(marked(mark), timeout=15)
    assert [process.cmdline()[:4] for process in alive] == []
    assert [path for path in shm if path.exists()] == []


@pytest.mark.parametrize("drafter", ["eagle3", "dflash"])
def test_the_whole_loop(setting: Setting, tmp_path: Path, drafter: str) -> None:
    out, mark = tmp_path / "run", new_mark()
    shm: set[Path] = set()
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            setting.command(out, "--minutes", "2", "--seed", "3", "--drafter", drafter),
            env=os.environ | mark, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None:
                shm |= shared_memory(marked(mark))
                time.sleep(2)
        finally:
            end(process, mark)
    text = (tmp_path / "output").read_text()
    assert process.returncode == 0, text[-3000:]
    assert "report.html" in text
    assert any("draftloop-" in path.name for path in shm), "the ring was never seen: nothing is proven by its absence"
    assert_all_gone(mark, shm)

    summary = Summary.load(out)
    assert (summary.status, summary.seed, summary.resume) == ("finished", 3, None)
    assert summary.failed_requests == 0
    assert summary.requests > 10
    assert summary.tokens_captured > 200
    assert (summary.records_dropped, summary.train_steps > 0) == (0, True)
    assert summary.swaps
    assert all(swap.checksum_ok and swap.stall_ms is not None for swap in summary.swaps)
    assert summary.drafter.versions == ["v0", *(swap.version for swap in summary.swaps)]
    assert summary.token_identical is True
    assert summary.compared == HELDOUT_PROMPTS
    assert summary.compared_tokens in (2 * HELDOUT_PROMPTS * HELDOUT_TOKENS, 3 * HELDOUT_PROMPTS * HELDOUT_TOKENS)
    lengths, speed = summary.accept_length, summary.tokens_per_s
    assert lengths.day0 is not None
    assert lengths.final is not None
    assert 1.0 <= lengths.day0 <= 4.0
    assert lengths.final > lengths.day0
    assert set(lengths.by_domain) == {"chat", "code"}
    assert all(value is not None and value > 0 for value in (speed.plain, speed.day0, speed.final))
    assert summary.capture_overhead.ratio_on_off is not None

    assert report_is_whole(out)
    assert load_config(out / "config.yaml").demo.minutes == 2
    newest = Manifest.load(out / "checkpoints" / summary.drafter.versions[-1])
    assert newest.parent == summary.drafter.versions[-2]
    assert newest.lineage.train_steps > 0
    assert newest.kind == drafter
    versions = VersionRegistry(out).all()
    assert [version.name for version in versions] == summary.drafter.versions
    assert {version.state for version in versions} == {"promoted"}
    counts = read_counts(out / "journal")
    assert counts.balanced
    assert counts.trained > 0
    assert len(events_of(out, "swap")) == len(summary.swaps)
    # The server measured its own steps, so the gate can say what a candidate's length would bring.
    for event in events_of(out, "promoted"):
        assert event.data["tokens_per_s_after"] > 0
        assert event.data["tokens_per_s_before"] > 0


def test_ctrl_c_while_refreshing(setting: Setting, tmp_path: Path) -> None:
    """SIGINT to the command's process only: it must stop Ray, the server and their children by itself."""
    out, mark = tmp_path / "run", new_mark()
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            setting.command(out, "--minutes", "30"),
            env=os.environ | mark, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            wait_for(lambda: bool(events_of(out, "train_step")), process, 480, tmp_path / "output")
            processes = marked(mark)
            shm = shared_memory(processes)
            assert any("sglang" in " ".join(p.cmdline()) for p in processes)
            process.send_signal(signal.SIGINT)
            process.wait(timeout=90)
        finally:
            end(process, mark)
    text = (tmp_path / "output").read_text()
    assert process.returncode == 130, text[-3000:]
    assert "Traceback" not in text
    assert f"{out}/report.html" in text
    assert_all_gone(mark, shm)

    summary = Summary.load(out)
    assert summary.status == "interrupted"
    assert summary.train_steps > 0
    assert summary.accept_length.day0 is not None
    assert (summary.accept_length.final, summary.token_identical) == (None, None)
    assert summary.resume is not None
    assert summary.resume.endswith("--resume")
    assert report_is_whole(out)
    counts = read_counts(out / "journal")
    assert counts.balanced
    assert counts.kept > 0
    assert Manifest.load(out / "checkpoints" / "v0").version == "v0"


def test_a_server_that_dies_while_training(setting: Setting, tmp_path: Path) -> None:
    """kill -9 of SGLang's scheduler: one line that says how to go on, nothing left running, and going on works."""
    out, mark = tmp_path / "run", new_mark()
    output = tmp_path / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            setting.command(out, "--minutes", "30"),
            env=os.environ | mark, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            wait_for(lambda: bool(events_of(out, "train_step")), process, 480, output)
            schedulers = [p for p in marked(mark) if "sglang::scheduler" in " ".join(p.cmdline())]
            assert schedulers
            schedulers[0].kill()
            process.wait(timeout=120)
        finally:
            end(process, mark)
    text = output.read_text()
    assert process.returncode == 2, text[-3000:]
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, text[-3000:]
    assert errors[0].endswith(f"draftloop demo --out {out} --resume")
    assert_all_gone(mark, set())
    assert Summary.load(out).status == "failed"
    assert report_is_whole(out)
    before = read_counts(out / "journal")
    assert before.balanced
    assert before.trained > 0

    with (tmp_path / "again").open("w") as file:
        again = subprocess.Popen(
            setting.command(out, "--minutes", "30", "--resume"),
            env=os.environ | mark, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            steps = len(events_of(out, "train_step"))
            wait_for(lambda: len(events_of(out, "train_step")) > steps, again, 480, tmp_path / "again")
        finally:
            end(again, mark)
    assert again.returncode == 130
    after = read_counts(out / "journal")
    assert after.balanced
    assert after.captured > before.captured
    assert after.trained > before.trained
    first, second = events_of(out, "trainer_started")
    assert first.data["reason"] == "training starts anew: nothing was saved"
    assert second.data["reason"] == "training goes on from the saved state"
    assert second.data["steps"] > 0


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], within_s: float, output: Path) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert process.poll() is None, output.read_text()[-3000:]
        assert time.monotonic() < deadline, output.read_text()[-3000:]
        time.sleep(0.5)


def end(process: subprocess.Popen[bytes], mark: dict[str, str]) -> None:
    """After a failed test: nothing of this run may stay."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        for left in marked(mark):
            left.kill()
        process.wait()


# --- bad input: exit code 2, one line that says what to do, nothing left running


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def refused(command: list[str], *, quick_s: float = QUICK_S) -> str:
    """Run a command that must be refused; returns the message."""
    mark = new_mark()
    done = subprocess.run(
        command, env=os.environ | mark, capture_output=True, text=True, check=False, timeout=quick_s,
        start_new_session=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr[-3000:]
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr[-3000:]
    assert "Traceback" not in done.stderr + done.stdout
    assert_all_gone(mark, set())
    return errors[0]


def prompt_file(folder: Path, text: str | None) -> Path:
    path = folder / "mine.jsonl"
    if text is not None:
        path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no prompt file"),
        ("", "is empty"),
        ('{"prompt": "bado"}\nbado kiru\n', "line 2 is not JSON"),
        (json.dumps({"prompt": "bado kiru " * 600}), "at most 968 fit"),
    ],
    ids=["missing", "empty", "not JSON", "too long"],
)
def test_bad_prompts(setting: Setting, tmp_path: Path, text: str | None, message: str) -> None:
    """An earlier run in the same folder is moved aside, not lost."""
    path, out = prompt_file(tmp_path, text), tmp_path / "run"
    out.mkdir()
    (out / "summary.json").write_text("{}")
    error = refused(setting.command(out, "--prompts", str(path)))
    assert message in error
    assert ("mine:1" if "fit" in message else str(path)) in error
    (earlier,) = tmp_path.glob("run.*")
    assert (earlier / "summary.json").read_text() == "{}"


def test_a_folder_that_cannot_be_written(setting: Setting, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a regular file")
    error = refused(setting.command(tmp_path / "file" / "run"))
    assert "cannot write to" in error
    assert "--out" in error
    assert (tmp_path / "file").read_text() == "a regular file"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("server.no_such_key=1", "config server.no_such_key"),
        ("no_such_section.a=1", "config no_such_section"),
        ("server.topk=many", "config server.topk"),
        ("server.topk", "must look like section.key=value"),
    ],
)
def test_bad_overrides(setting: Setting, tmp_path: Path, override: str, message: str) -> None:
    assert message in refused(setting.command(tmp_path / "run", "--set", override), quick_s=30)
    assert not (tmp_path / "run").exists()


def test_a_target_that_is_no_checkpoint(setting: Setting, tmp_path: Path) -> None:
    error = refused(setting.command(tmp_path / "run", "--set", f"target.path={tmp_path}"))
    assert "neither 'smollm2' nor an HF checkpoint folder" in error


def test_a_port_in_use(setting: Setting, tmp_path: Path, taken: int) -> None:
    error = refused(setting.command(tmp_path / "run", "--set", f"server.port={taken}"))
    assert f"port {taken}" in error
    assert "server.port" in error


def test_a_drafter_of_another_target(setting: Setting, tmp_path: Path) -> None:
    other = make_tiny_target(tmp_path / "other-llama", seed=8)
    make_untrained(other.folder, load_config(setting.config).drafter, [], tmp_path / "drafter", "v7", seed=0)
    error = refused(setting.command(tmp_path / "run", "--set", f"drafter.checkpoint={tmp_path / 'drafter'}"))
    fingerprint = target_identity(other.folder).fingerprint[:12]
    assert f"drafter v7 was trained for target other-llama ({fingerprint})" in error


def test_nothing_to_resume(setting: Setting, tmp_path: Path) -> None:
    assert "no checkpoint to resume from" in refused(setting.command(tmp_path / "run", "--resume"), quick_s=30)
