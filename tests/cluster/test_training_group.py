"""A training group of two Ray actors: it trains as one process would, and a death in it is an error, not a hang."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from safetensors.torch import load_file
from tiny_llama import TinyTarget, random_prompts

from draftloop.cli.actors import start_local_ray
from draftloop.core.config import Config
from draftloop.core.errors import TrainingError
from draftloop.refresher.replay import in_one_process
from draftloop.trainer.day0 import make_untrained
from draftloop.trainer.trainer import Trainer, TrainerActor

CONFIG = Config.model_validate(
    {
        "server": {"device": "cpu"},
        "drafter": {"draft_vocab_size": 256},
        "capture": {"holdout_fraction": 0.25},
        "trainer": {"device": "cpu", "batch_tokens": 128, "max_length": 48, "processes": 2},
        "gate": {"min_records": 1},
    }
)
PROMPTS = random_prompts(16, [8, 12, 30], seed=1)


@pytest.fixture(autouse=True)
def _local_ray() -> Iterator[None]:
    threads = torch.get_num_threads()
    start_local_ray(None)
    yield
    ray.shutdown()
    torch.set_num_threads(threads)


def _peers() -> list[psutil.Process]:
    """The other processes of the groups of this test's Ray; Ray names a process after its class."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.cmdline()[:1] and child.cmdline()[0].startswith("ray::Peer"):
                found.append(child)
    return found


def _group(target: TinyTarget, day0: Path, run: Path) -> Any:
    return TrainerActor.options(num_cpus=0).remote(target.folder, day0, CONFIG, run)


def test_two_actors_train_as_one_process(target: TinyTarget, tmp_path: Path) -> None:
    day0 = tmp_path / "v0"
    make_untrained(target.folder, CONFIG.drafter, PROMPTS, day0, "v0", seed=0)
    run = tmp_path / "run"
    group = _group(target, day0, run)
    records = [target.record(prompt, 40, "chat", i) for i, prompt in enumerate(PROMPTS)]
    alone = Trainer(target.folder, day0, in_one_process(CONFIG))
    alone.add_records(records)
    ray.get(group.add_records.remote(records))

    expected, reports = alone.train_steps(4), ray.get(group.train_steps.remote(4))
    for one, two in zip(reports, expected, strict=True):
        assert one.loss == pytest.approx(two.loss, rel=1e-5)
        assert (one.step, one.tokens, one.positions) == (two.step, two.tokens, two.positions)
    assert (alone.rebuild_vocabulary() is None) == (ray.get(group.rebuild_vocabulary.remote()) is None)
    alone.train_steps(1)
    ray.get(group.train_steps.remote(1))
    one = load_file(ray.get(group.save_candidate.remote(tmp_path / "v1", "v1", {})) / "model.safetensors")
    two = load_file(alone.save_candidate(tmp_path / "alone", "v1", {}) / "model.safetensors")
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-4, atol=1e-6)
    ours, theirs = alone.compare(), ray.get(group.compare.remote())
    assert ours is not None
    assert theirs.after.accept_length == pytest.approx(ours.after.accept_length, rel=1e-3)
    # Nobody counts the steps of a slice ahead: the group stops together, or the next calls would wait for ever.
    ray.get(group.promoted.remote(tmp_path / "v1"))
    timed = ray.get(group.train.remote(0.5))
    assert [report.step for report in timed] == list(range(6, 6 + len(timed)))

    (peer,) = _peers()
    peer.kill()
    with pytest.raises(TrainingError, match="lost one of its 2 processes"):
        ray.get(group.train.remote(600.0), timeout=300)
    ray.kill(group)
    again = _group(target, tmp_path / "v1", run)
    assert ray.get(again.started.remote()).steps == 5, "as saved with the candidate"
    assert ray.get(again.train_steps.remote(1))[0].step == 6
    ray.kill(again)
    # The peers end with their first.
    psutil.wait_procs(_peers(), timeout=60)
    assert not _peers()
