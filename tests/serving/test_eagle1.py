"""An EAGLE-1 head in a real server: greedy output is the target's, capture is true, a swap changes the head only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tiny_llama import TinyTarget, random_prompts

from draftloop.core.config import Config
from draftloop.fleet.worker import Worker
from draftloop.trainer.day0 import make_untrained
from draftloop.trainer.trainer import Trainer

from .checks import assert_greedy
from .conftest import CONFIG, TRAINING_PROMPTS, Served

STEPS = 40


@pytest.fixture(scope="module")
def served(target: TinyTarget, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("eagle1")
    config = Config.model_validate(CONFIG.model_dump() | {"drafter": {"kind": "eagle1"}})
    make_untrained(target.folder, config.drafter, TRAINING_PROMPTS, folder / "v0", "v0", seed=0)
    trainer = Trainer(target.folder, folder / "v0", config)
    trainer.add_records([target.record(prompt, 48, "chat", i) for i, prompt in enumerate(TRAINING_PROMPTS)])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    trainer.train_steps(STEPS)
    torch.set_num_threads(threads)
    trainer.save_candidate(folder / "v1", "v1", {})
    worker = Worker(target.folder, config, folder / "server.log")
    try:
        yield Served(worker, worker.start(folder / "v0"), target, folder / "v0")
    finally:
        worker.stop()


def test_output_and_capture(served: Served) -> None:
    answers = served.ask(random_prompts(5, [5, 17, 70], seed=41), 24)
    assert_greedy(served, answers, 24)
    for answer, record in zip(answers, served.records(answers), strict=True):
        assert record.verify_steps
        assert sum(step.accepted + 1 for step in record.verify_steps) >= len(answer.output) - 1
        # The head reads the final state, which is all that EAGLE asks of the target.
        states = served.target.states([*answer.whole[: record.start], *record.token_ids.tolist()])
        expected = states.last_hidden[record.start :]
        for got in (torch.from_numpy(record.fused), torch.from_numpy(record.last_hidden)):
            torch.testing.assert_close(got.float(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_trained_head_goes_in_and_drafts(served: Served) -> None:
    prompts = random_prompts(6, [9, 30], seed=42)
    before = served.ask(prompts, 24)
    assert served.worker.swap(served.drafter.with_name("v1")).report.checksum_ok
    after = served.ask(prompts, 24)
    assert [answer.output for answer in after] == [answer.output for answer in before]
    assert {answer.meta["weight_version"] for answer in after} == {"v1"}
    steps = [sum(answer.meta["spec_verify_ct"] for answer in answers) for answers in (before, after)]
    assert steps[1] < steps[0]
