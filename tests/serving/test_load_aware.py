"""A real server that follows its load: whatever shape it runs, tokens, captured rows and drafts are the right ones.

output      greedy tokens under forced switching of every shape, each step another one, and left to itself
rest        a drafter that slept through plain steps drafts the tree that it would have drafted awake
report      steps by shape, reliability, step times and their costs reach the file that report and gate read
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_llama import TinyTarget, random_prompts

from draftloop.drafters.load.shapes import PLAIN, Shape, block_shapes, tree_shapes
from draftloop.fleet.worker import Worker
from draftloop.sglang.load.report import EVERY_S
from draftloop.sglang.load.settings import REPORT_FILE, pin
from draftloop.trainer.day0 import make_untrained

from .checks import assert_greedy, paths_of
from .conftest import CONFIG, TRAINING_PROMPTS, Answer, Served
from .eagle3_by_hand import Eagle3ByHand

LENGTHS = [5, 17, 40, 150]
LARGEST = Shape(CONFIG.server.num_steps, CONFIG.server.topk, CONFIG.server.num_draft_tokens)
SHAPES = tree_shapes(LARGEST.depth, LARGEST.width, LARGEST.nodes)


@pytest.fixture(scope="module")
def served(
    target: TinyTarget, trained: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    config = CONFIG.model_copy(deep=True)
    config.speculation.follow_load = True
    worker = Worker(target.folder, config, tmp_path_factory.mktemp("load") / "server.log")
    url = worker.start(trained[0])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield Served(worker, url, target, trained[0])
    finally:
        torch.set_num_threads(threads)
        worker.stop()


def ask_pinned(served: Served, shapes: Sequence[Shape], prompts: list[list[int]], tokens: int) -> list[Answer]:
    pin(served.worker.load_folder, shapes)
    try:
        answers = served.ask(prompts, tokens)
    finally:
        pin(served.worker.load_folder, ())
    assert_greedy(served, answers, tokens)
    return answers


def test_every_shape_alone(served: Served) -> None:
    assert len(SHAPES) >= 10
    for number, shape in enumerate(SHAPES):
        answers = ask_pinned(served, [shape], random_prompts(2, [9, 30], seed=100 + number), 16)
        for record in served.records(answers):
            assert {len(step.draft_tokens) for step in record.verify_steps} == {shape.nodes - 1}


def test_another_shape_each_step(served: Served) -> None:
    """All shapes in turn, in a batch whose requests come and go, with plain steps in between and in rows of three."""
    mixed = [*SHAPES, *chain.from_iterable((PLAIN, PLAIN, PLAIN, shape) for shape in SHAPES[::3])]
    prompts = random_prompts(16, LENGTHS, seed=31)
    answers = ask_pinned(served, mixed, prompts, 40)
    sizes: set[int] = set()
    for answer, record in zip(answers, served.records(answers), strict=True):
        assert len(record.token_ids) + record.start >= len(answer.whole) - 1, "the tap missed a step"
        sizes |= {len(step.draft_tokens) + 1 for step in record.verify_steps}
    assert sizes == {shape.nodes for shape in SHAPES}


def test_a_rested_drafter_drafts_as_if_it_had_been_awake(served: Served) -> None:
    """Trees drafted right after plain steps, against the ones drafted by hand from all of the target's states."""
    embedding = served.target.model.get_input_embeddings().weight.detach()
    by_hand = Eagle3ByHand(load_file(served.drafter / "model.safetensors"), embedding)
    answers = ask_pinned(served, [LARGEST, PLAIN, PLAIN, PLAIN], random_prompts(3, LENGTHS[:3], seed=32), 24)
    compared = 0
    for answer, record in zip(answers, served.records(answers), strict=True):
        for before, step in zip(record.verify_steps, record.verify_steps[1:], strict=False):
            known = answer.whole[: step.position + 1]
            if len(before.draft_tokens) or not len(step.draft_tokens) or len(known) <= step.position:
                continue
            fused = served.target.states(known[:-1]).fused
            expected = by_hand.draft(fused, known[1:], LARGEST.width, LARGEST.depth, LARGEST.nodes)
            if expected.margin < 1e-4:
                continue
            compared += 1
            assert set(paths_of(step)) == expected.paths
    assert compared >= 6


def test_left_to_itself_it_follows_and_reports(served: Served) -> None:
    """What it chooses depends on the machine; that it is lossless, calibrated and reported does not."""
    file = served.worker.load_folder / REPORT_FILE
    until = time.monotonic() + 60
    said = None
    while said is None and time.monotonic() < until:
        assert_greedy(served, served.ask(random_prompts(8, LENGTHS, seed=33), 48), 48)
        if file.exists() and file.stat().st_mtime > time.time() - EVERY_S:
            said = json.loads(file.read_text(encoding="utf-8"))
    assert said is not None, "the server reported nothing"
    assert sum(steps for by_shape in said["steps"].values() for steps in by_shape.values()) > 100
    assert len(said["reliability"]) == LARGEST.depth
    assert all(0 <= confidence <= 1 and 0 <= accepted <= 1 for confidence, accepted, _ in said["reliability"][0])
    assert sum(drafts for _, _, drafts in said["reliability"][0]) > 50
    assert said["cost_error"] is not None
    costs = served.worker.costs()
    assert costs is not None
    assert (costs.follows, costs.shape) == (True, LARGEST)
    assert costs.tokens_per_s(2.0) > costs.tokens_per_s(1.0) > 0
    assert served.worker.speculation() == json.loads(file.read_text(encoding="utf-8"))


def test_dflash_blocks_of_every_length(target: TinyTarget, served: Served, tmp_path: Path) -> None:
    """A server of its own, after the other one's tests: its block's length changes each step, then by its choice."""
    served.worker.stop()
    config = CONFIG.model_copy(deep=True)
    config.speculation.follow_load = True
    config.drafter.kind, config.drafter.num_layers = "dflash", 1
    make_untrained(target.folder, config.drafter, TRAINING_PROMPTS, tmp_path / "v0", "v0", seed=0)
    worker = Worker(target.folder, config, tmp_path / "server.log")
    shapes = block_shapes(config.drafter.block_size)
    try:
        blocks = Served(worker, worker.start(tmp_path / "v0"), target, tmp_path / "v0")
        answers = ask_pinned(blocks, shapes, random_prompts(8, LENGTHS, seed=41), 40)
        sizes: set[int] = set()
        for record in blocks.records(answers):
            sizes |= {len(step.draft_tokens) + 1 for step in record.verify_steps}
        assert sizes == {shape.nodes for shape in shapes}
        assert_greedy(blocks, blocks.ask(random_prompts(8, LENGTHS, seed=42), 40), 40)
    finally:
        worker.stop()
