"""A real SGLang server with a speculative tree, our tap and our swaps, against plain transformers.

    output      every greedy token is transformers' own, alone, in a batch, from the cache, in chunks, across swaps
    capture     every captured row is what a plain forward computes; verification steps add up
    drafting    the drafted tree is the one the checkpoint implies
    swap        in place, under load, verified, stamped; anything unfit is refused and nothing changes

The tests share one server (a start takes most of a minute); each leaves the drafter v0 in service, the last ends it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import shared_memory
from safetensors.torch import load_file, save_file
from tiny_llama import LAYER_IDS, make_tiny_target, random_prompts

from draftloop.core.errors import CheckpointError, DraftloopError, ManifestError, ServerError
from draftloop.core.manifest import Manifest
from draftloop.core.records import CaptureRecord
from draftloop.sglang import swap as swap_module
from draftloop.sglang.client import ServerClient
from draftloop.sglang.swap import ALIASED, ServingSlot, SwapError, server_checksums
from draftloop.trainer.day0 import make_untrained

from .conftest import CHUNK, CONFIG, TRAINING_PROMPTS, Answer, Served, paths_of
from .eagle3_by_hand import Eagle3ByHand

LENGTHS = [5, 17, 40, CHUNK - 1, CHUNK, CHUNK + 1, 150, 3 * CHUNK]
TOPK, STEPS, NODES = CONFIG.server.topk, CONFIG.server.num_steps, CONFIG.server.num_draft_tokens


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_true_states(served: Served, answer: Answer, record: CaptureRecord) -> None:
    """The record's rows are a plain forward's, and its tokens the request's (a last step may reach beyond them)."""
    tokens = record.token_ids.tolist()
    whole = [*answer.whole[: record.start], *tokens]
    length = min(len(whole), len(answer.whole))
    assert whole[:length] == answer.whole[:length]
    # The last token of an answer has not been an input yet.
    assert len(whole) >= len(answer.whole) - 1
    states = served.target.states(whole)
    for got, expected in (
        (torch.from_numpy(record.fused), states.fused[record.start :]),
        (torch.from_numpy(record.last_hidden), states.last_hidden[record.start :]),
    ):
        torch.testing.assert_close(got.float(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def assert_steps_add_up(answer: Answer, record: CaptureRecord) -> None:
    """Each step starts where the last one ended, and accepts the longest drafted path that the target goes too."""
    known = [*answer.whole[: record.start], *record.token_ids.tolist()]
    position = len(answer.prompt)
    for number, step in enumerate(record.verify_steps):
        assert step.position == position
        assert len(step.draft_tokens) == len(step.parents) == NODES - 1
        assert all(parent <= node for node, parent in enumerate(step.parents.tolist()))
        paths = set(paths_of(step))
        assert len(paths) == NODES - 1
        went = tuple(known[position + 1 : position + 1 + step.accepted])
        assert len(went) == step.accepted
        assert not went or went in paths
        position += step.accepted + 1
        if number + 1 < len(record.verify_steps):
            assert (*went, known[position]) not in paths, "a longer drafted path was right"
    assert position >= len(answer.whole) - 1


def checksums(served: Served) -> dict[str, str]:
    with ServerClient(served.url) as client:
        return client.draft_checksums(ALIASED)


def checksums_of(folder: Path) -> dict[str, str]:
    return server_checksums(load_file(folder / "model.safetensors"), "eagle3", torch.float32)


def accept_length(answers: Sequence[Answer]) -> float:
    return sum(len(a.output) for a in answers) / sum(a.meta["spec_verify_ct"] for a in answers)


# --- output


def test_one_prompt_at_a_time(served: Served) -> None:
    answers = [served.ask_one(prompt, 40) for prompt in random_prompts(4, LENGTHS[:4], seed=10)]
    served.assert_greedy(answers, 40)
    assert min(len(set(answer.output)) for answer in answers) > 8, "the target repeats itself: nothing is proven"


def test_a_batch_of_mixed_lengths_and_again_from_the_cache(served: Served) -> None:
    prompts = random_prompts(8, LENGTHS, seed=11)
    first = served.ask(prompts, 40)
    served.assert_greedy(first, 40)
    assert max(answer.meta["cached_tokens"] for answer in first) < 8
    again = served.ask(prompts, 40)
    assert [answer.output for answer in again] == [answer.output for answer in first]
    assert all(a.meta["cached_tokens"] >= len(a.prompt) // 2 for a in again if len(a.prompt) > 8)


def test_more_requests_than_may_run(served: Served) -> None:
    """Twice `max_running_requests`, so that some wait and join a running batch."""
    prompts = random_prompts(2 * CONFIG.server.max_running_requests, LENGTHS, seed=12)
    served.assert_greedy(served.ask(prompts, 24), 24)


# --- capture


def test_captured_rows_are_a_plain_forwards(served: Served) -> None:
    """Concurrent requests, in chunks where they are long."""
    answers = served.ask(random_prompts(8, LENGTHS, seed=13), 32)
    for answer, record in zip(answers, served.records(answers), strict=True):
        # A random prompt may share its first tokens with an earlier one.
        assert record.start <= 2
        assert (record.domain, record.prompt_len) == ("chat", len(answer.prompt))
        assert_true_states(served, answer, record)
        assert_steps_add_up(answer, record)
        assert {step.drafter_version for step in record.verify_steps} == {"v0"}


def test_cached_prefixes_start_later_and_are_as_true(served: Served) -> None:
    (stem,) = random_prompts(1, [CHUNK + 40], seed=14)
    tails = random_prompts(4, [3, 20, CHUNK + 9], seed=15)
    served.ask_one(stem, 4)
    answers = served.ask([[*stem, *tail] for tail in tails], 24, domain="code")
    for answer, record in zip(answers, served.records(answers), strict=True):
        assert 0 < record.start <= len(stem)
        assert record.start == answer.meta["cached_tokens"]
        assert record.domain == "code"
        assert_true_states(served, answer, record)
        assert_steps_add_up(answer, record)


def test_the_opted_out_domain_is_never_captured(served: Served) -> None:
    prompts = random_prompts(6, LENGTHS, seed=16)
    hidden = served.ask(prompts[:3], 16, domain="heldout")
    seen = served.ask(prompts[3:], 16)
    served.records(seen)
    served.assert_greedy(hidden, 16)
    captured = served.captured_ids()
    assert {answer.request_id for answer in seen} <= captured
    assert not [request_id for request_id in captured if request_id.startswith("heldout")]


def test_nothing_was_dropped_or_damaged(served: Served) -> None:
    counts = served.worker.counts()
    assert (counts.records_dropped, counts.damaged) == (0, 0)


# --- drafting


def test_the_tree_is_the_one_the_checkpoint_implies(served: Served, trained: tuple[Path, Path]) -> None:
    """The first tree of each request, path by path, for the day-0 drafter and a trained one.

    A prompt in which two scores lie within 1e-4 of each other decides nothing; there may be few.
    """
    compared = moved = 0
    for seed, version, folder in ((17, "v0", served.drafter), (18, "v1", trained[0])):
        if version != "v0":
            served.worker.swap(folder)
        embedding = served.target.model.get_input_embeddings().weight.detach()
        by_hand = Eagle3ByHand(load_file(folder / "model.safetensors"), embedding)
        answers = served.ask(random_prompts(8, [6, 11, 33, CHUNK + 20], seed=seed), 8)
        for answer, record in zip(answers, served.records(answers), strict=True):
            step = record.verify_steps[0]
            assert step.drafter_version == version
            fused = served.target.states(answer.prompt).fused
            expected = by_hand.draft(fused, [*answer.prompt[1:], answer.output[0]], TOPK, STEPS, NODES)
            if expected.margin < 1e-4:
                continue
            compared += 1
            moved += expected.moved
            assert set(paths_of(step)) == expected.paths
    served.worker.swap(served.drafter)
    assert compared >= 12
    assert moved >= 1


# --- swap


def test_a_swap_under_load_changes_the_drafter_and_no_token(served: Served, trained: tuple[Path, Path]) -> None:
    before = served.ask(random_prompts(6, LENGTHS[:6], seed=20), 48)
    running = threading.Event()
    stop = threading.Event()
    endless = itertools.cycle(random_prompts(40, LENGTHS, seed=21))

    def load() -> list[Answer]:
        mine = []
        while not stop.is_set():
            mine.append(served.ask_one(next(endless), 64))
            running.set()
        return mine

    with ThreadPoolExecutor(6) as pool:
        loops = [pool.submit(load) for _ in range(6)]
        try:
            assert running.wait(120)
            done = served.worker.swap(trained[0])
        finally:
            stop.set()
        during = [answer for loop in loops for answer in loop.result()]

    assert done.report.version == "v1"
    assert done.report.checksum_ok
    assert done.stall_ms is not None
    assert 0 < done.report.update_ms <= done.report.paused_ms
    assert checksums(served) == checksums_of(trained[0])
    assert len(during) >= 12
    served.assert_greedy(during, 64)
    versions = [{step.drafter_version for step in record.verify_steps} for record in served.records(during)]
    assert {"v0"} in versions
    assert {"v0", "v1"} in versions, "no request was running across the swap"

    after = served.ask([answer.prompt for answer in before], 48)
    assert [answer.output for answer in after] == [answer.output for answer in before]
    assert {answer.meta["weight_version"] for answer in after} == {"v1"}
    for answer, record in zip(after, served.records(after), strict=True):
        assert {step.drafter_version for step in record.verify_steps} == {"v1"}
        assert_true_states(served, answer, record)
        assert_steps_add_up(answer, record)
    assert accept_length(after) > accept_length(before) + 0.2, "the trained drafter does not draft"

    served.worker.swap(served.drafter)
    assert checksums(served) == checksums_of(served.drafter)
    back = served.ask([answer.prompt for answer in before], 48)
    assert [answer.output for answer in back] == [answer.output for answer in before]
    assert accept_length(back) == accept_length(before)


def test_three_swaps_in_a_row(served: Served, trained: tuple[Path, Path]) -> None:
    prompts = random_prompts(3, LENGTHS[:3], seed=22)
    plain = [answer.output for answer in served.ask(prompts, 16)]
    for folder in (*trained, served.drafter):
        done = served.worker.swap(folder)
        assert done.report.checksum_ok
        assert checksums(served) == checksums_of(folder)
        answers = served.ask(prompts, 16)
        assert [answer.output for answer in answers] == plain
        assert {answer.meta["weight_version"] for answer in answers} == {folder.name}


def changed(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint whose tensors were changed after export."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def made_for(folder: Path, served: Served, **other: Any) -> Path:
    """A sound day-0 drafter that differs in one thing."""
    config = CONFIG.drafter.model_copy(update={"layer_ids": other.get("layer_ids", LAYER_IDS)})
    target = other.get("target", served.target.folder)
    make_untrained(target, config, other.get("prompts", TRAINING_PROMPTS), folder, "v9", seed=0)
    return folder


def truncated(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return folder


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["midlayer.mlp.up_proj.weight"]


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["midlayer.mlp.extra.weight"] = torch.zeros(2)


def _misshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].contiguous()


def _poison(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"][3] = float("nan")


def _touch(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"][3] += 1e-3


Unfit = Callable[[Served, Path, Path], Path]

UNFIT: dict[str, tuple[Unfit, type[DraftloopError], str]] = {
    "another target": (
        lambda s, v1, to: made_for(to, s, target=make_tiny_target(to.with_name("other"), seed=5).folder),
        ManifestError,
        "was trained for target other",
    ),
    "other layers": (
        lambda s, v1, to: made_for(to, s, layer_ids=(0, 1, 2)),
        ManifestError,
        r"reads target layers \[0, 1, 2\], the server captures \[0, 1, 3\]",
    ),
    "another vocabulary map": (
        lambda s, v1, to: made_for(to, s, prompts=random_prompts(9, [40], seed=99)),
        ManifestError,
        "has another draft vocabulary",
    ),
    "a missing tensor": (
        lambda s, v1, to: changed(v1, to, _drop),
        CheckpointError,
        "tensor midlayer.mlp.up_proj.weight is missing",
    ),
    "an extra tensor": (
        lambda s, v1, to: changed(v1, to, _add),
        CheckpointError,
        "tensor midlayer.mlp.extra.weight does not belong",
    ),
    "a misshaped tensor": (
        lambda s, v1, to: changed(v1, to, _misshape),
        CheckpointError,
        r"tensor lm_head.weight has shape \[255, 64\]",
    ),
    "NaN": (lambda s, v1, to: changed(v1, to, _poison), CheckpointError, "norm.weight holds NaN"),
    "a changed weight": (lambda s, v1, to: changed(v1, to, _touch), CheckpointError, "checksum of tensor norm.weight"),
    "a cut file": (lambda s, v1, to: truncated(v1, to), CheckpointError, "damaged or cut short"),
    "no checkpoint": (lambda s, v1, to: to, ManifestError, "has no draftloop_manifest.json"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_an_unfit_drafter_is_refused_and_nothing_changes(
    served: Served, trained: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    make, error, message = UNFIT[name]
    folder = make(served, trained[0], tmp_path / "unfit")
    with pytest.raises(error, match=message) as caught:
        served.worker.swap(folder)
    assert "\n" not in str(caught.value)
    assert checksums(served) == checksums_of(served.drafter)
    (answer,) = served.ask(random_prompts(1, [9], seed=23), 8)
    assert answer.meta["weight_version"] == "v0"


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file goes bad between our check and SGLang's reading of it."""
    monkeypatch.setattr(swap_module, "verify_checkpoint", lambda folder, *rest: Manifest.load(folder))


def slot_of(served: Served) -> ServingSlot:
    manifest = Manifest.load(served.drafter)
    return ServingSlot(manifest.target, manifest.layer_ids, manifest.vocab_map_sha256, torch.float32)


@pytest.mark.usefixtures("unchecked")
def test_a_file_that_goes_bad_late_is_refused_by_the_scheduler(
    served: Served, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = changed(trained[0], tmp_path / "late", _poison)
    with ServerClient(served.url) as client, pytest.raises(SwapError, match=r"refused drafter v1.*v0 serves on"):
        swap_module.swap(client, folder, slot_of(served), "v0")
    assert checksums(served) == checksums_of(served.drafter)
    answers = served.ask(random_prompts(2, [9, 30], seed=24), 16)
    served.assert_greedy(answers, 16)
    assert {answer.meta["weight_version"] for answer in answers} == {"v0"}


@pytest.mark.usefixtures("unchecked")
def test_a_torn_update_is_said_and_mended(served: Served, trained: tuple[Path, Path], tmp_path: Path) -> None:
    """A file whose later tensors do not fit: earlier ones are in the server already. Output stays the target's."""
    folder = changed(trained[0], tmp_path / "torn", _misshape)
    with ServerClient(served.url) as client, pytest.raises(SwapError, match=r"only in part.*restore v0"):
        swap_module.swap(client, folder, slot_of(served), "v0")
    assert checksums(served) != checksums_of(served.drafter)
    answers = served.ask(random_prompts(4, LENGTHS[:4], seed=25), 24)
    served.assert_greedy(answers, 24)
    assert {answer.meta["weight_version"] for answer in answers} == {"torn-v1"}
    served.worker.swap(served.drafter)
    assert checksums(served) == checksums_of(served.drafter)
    assert served.ask_one([20, 21, 22], 4).meta["weight_version"] == "v0"


# --- the end


def test_a_server_that_dies_is_one_clear_line_and_leaves_nothing(served: Served, trained: tuple[Path, Path]) -> None:
    server = psutil.Process(served.worker._server._process.pid)  # type: ignore[union-attr]
    processes = [server, *server.children(recursive=True)]
    assert len(processes) >= 3
    ring = Path("/dev/shm") / served.worker._ring.name  # type: ignore[union-attr]
    shm = {ring, *shared_memory(processes)}
    assert any(path.name.startswith("sglang_") for path in shm)
    assert all(path.exists() for path in shm)
    os.killpg(server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while served.worker._server.alive and time.monotonic() < deadline:  # type: ignore[union-attr]
        time.sleep(0.05)
    for call in (served.worker.counts, lambda: served.worker.swap(trained[0])):
        with pytest.raises(ServerError, match="the SGLang server died") as caught:
            call()
        assert "\n" not in str(caught.value)
        assert "server.log" in str(caught.value)
    served.worker.stop()
    served.worker.stop()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
    assert [path for path in shm if path.exists()] == []
