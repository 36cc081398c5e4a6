"""A refresh from a file: the same file, drafter and seed give the same versions, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_llama import TinyTarget, random_prompts
from typer.testing import CliRunner

from draftloop.capture.record_file import TimedRecord, read_records, write_records
from draftloop.cli.main import app
from draftloop.core.config import Config
from draftloop.core.events import read_events
from draftloop.core.manifest import Manifest
from draftloop.core.versions import VersionRegistry
from draftloop.refresher.replay import Replay, checksums
from draftloop.trainer.day0 import make_untrained

SETTINGS: dict[str, Any] = {
    "server": {"topk": 4, "device": "cpu"},
    "drafter": {"draft_vocab_size": 256},
    "capture": {"holdout_fraction": 0.3},
    "trainer": {"device": "cpu", "batch_tokens": 256, "learning_rate": 3e-3},
    # A negative gain: what is promoted is the gate's test, here it is that it is the same.
    "gate": {"min_records": 2, "every_seconds": 60, "min_gain": -1.0},
}
PROMPTS = random_prompts(20, [8, 12], seed=1)
STEPS = 24


@pytest.fixture(autouse=True)
def _leave_this_process_as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def recorded(target: TinyTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three minutes of traffic: a folder with records.bin, the drafter v4 and draftloop.yaml."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("recorded")
    records = [
        TimedRecord(target.record(prompt, 40, ("chat", "code")[i % 2], i), 1000.0 + 9.0 * i, False)
        for i, prompt in enumerate(PROMPTS)
    ]
    write_records(folder / "records.bin", records)
    make_untrained(target.folder, Config.model_validate(SETTINGS).drafter, PROMPTS, folder / "v4", "v4", seed=0)
    (folder / "draftloop.yaml").write_text(yaml.safe_dump(SETTINGS | {"target": {"path": str(target.folder)}}))
    return folder


def replayed(target: TinyTarget, recorded: Path, out: Path, seed: int) -> dict[str, str]:
    events: list[str] = []

    def emit(kind: Any, **data: Any) -> None:
        events.append(f"{kind} {data['version']}")

    config = Config.model_validate(SETTINGS | {"seed": seed})
    replay = Replay(target.folder, recorded / "v4", config, out, STEPS, emit)
    versions = replay.run(read_records(recorded / "records.bin"))
    assert [event for event in events if "promoted" in event] == [f"promoted {version.name}" for version in versions]
    return checksums(VersionRegistry(out))


def test_two_replays_give_the_same_versions_and_another_seed_others(
    target: TinyTarget, recorded: Path, tmp_path: Path
) -> None:
    one = replayed(target, recorded, tmp_path / "one", seed=3)
    command = ["replay", str(recorded / "records.bin"), "--drafter", str(recorded / "v4"), "--steps", str(STEPS)]
    command += ["--config", str(recorded / "draftloop.yaml"), "--set", "seed=3", "--out", str(tmp_path / "two")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert checksums(VersionRegistry(tmp_path / "two")) == one
    assert list(one) == ["v4", "v5", "v6"]
    assert len(set(one.values())) == len(one)
    lines = done.output.splitlines()
    assert [line.split()[0] for line in lines] == list(one)
    assert all(one[line.split()[0]][:16] in line for line in lines)
    other = replayed(target, recorded, tmp_path / "three", seed=4)
    assert other["v4"] == one["v4"]
    assert other["v5"] != one["v5"]

    manifest = Manifest.load(tmp_path / "two" / "checkpoints" / "v5")
    assert manifest.parent == "v4"
    assert manifest.lineage.first_record_time is not None
    assert 1000.0 <= manifest.lineage.first_record_time < 1100.0, "the data's own time"
    tries = [event for event in read_events(tmp_path / "two" / "events.jsonl") if event.kind == "candidate"]
    assert [event.data["t_s"] for event in tries] == [117.0, 171.0], "one a minute, once enough is held out"
    # Says as much as a live run's gate; only what a step costs is not known.
    assert all(event.data["records"] >= 2 and event.data["gain_bounds"] for event in tries)
    assert {event.data["tokens_per_s_after"] for event in tries} == {None}
    assert (tmp_path / "two" / "config.yaml").exists()

    again = CliRunner().invoke(app, command)
    assert (again.exit_code, "exists already: choose a new folder" in again.output) == (2, True)


def test_bad_input_is_one_line(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not records")
    for file, message in ((tmp_path / "text", "is not a file of draftloop records"), (tmp_path / "no", "cannot read")):
        command = ["replay", str(file), "--drafter", str(recorded / "v4"), "--out", str(tmp_path / "out")]
        done = CliRunner().invoke(app, command)
        assert (done.exit_code, message in done.output) == (2, True)
        assert done.output.count("\n") == 1
    assert not (tmp_path / "out").exists()
