"""Swaps in a real SGLang server under load: in place, verified, stamped; anything unfit is refused and nothing changes.

The tests share one server; each leaves the drafter v0 in service.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import LAYER_IDS, make_tiny_target, random_prompts

from draftloop.core.errors import CheckpointError, DraftloopError, ManifestError
from draftloop.core.manifest import Manifest
from draftloop.drafters.vocab import ids_from_offsets
from draftloop.sglang import swap as swap_module
from draftloop.sglang.client import ServerClient
from draftloop.sglang.swap import ServingSlot, SwapError, server_checksums
from draftloop.trainer.day0 import make_untrained

from .checks import (
    LENGTHS,
    accept_length,
    assert_greedy,
    assert_steps_add_up,
    assert_true_states,
    checksums,
    checksums_of,
)
from .conftest import CONFIG, TRAINING_PROMPTS, Answer, Served


def test_a_swap_under_load_changes_the_drafter_and_no_token(served: Served, trained: tuple[Path, Path]) -> None:
    before = served.ask(random_prompts(6, LENGTHS[:6], seed=20), 48)
    running = threading.Event()
    stop = threading.Event()
    endless = itertools.cycle(random_prompts(40, LENGTHS, seed=21))

    def load() -> list[Answer]:
        mine: list[Answer] = []
        while not stop.is_set() or len(mine) < 2:
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
    assert_greedy(served, during, 64)
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


def test_a_swap_waits_for_no_request(served: Served, trained: tuple[Path, Path]) -> None:
    """One that runs for long is still running when the swap is over: nothing was drained."""
    prompt = random_prompts(1, [12], seed=26)[0]
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(served.ask_one, prompt, 900)
        while not served.worker.sample().running:
            assert not long.done()
        served.worker.swap(trained[0])
        assert not long.done()
        assert_greedy(served, [long.result()], 900)
    served.worker.swap(served.drafter)


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
    target, prompts = other.pop("target", served.target.folder), other.pop("prompts", TRAINING_PROMPTS)
    config = CONFIG.drafter.model_copy(update={"layer_ids": LAYER_IDS, **other})
    make_untrained(target, config, prompts, folder, "v9", seed=0)
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


def _shrink(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"] = tensors["norm.weight"][:-1].contiguous()


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
    "a larger draft vocabulary": (
        lambda s, v1, to: made_for(to, s, draft_vocab_size=320),
        CheckpointError,
        r"tensor d2t \[320\] does not fit the running drafter v0; start a server",
    ),
    "another kind": (
        lambda s, v1, to: made_for(to, s, kind="dflash"),
        CheckpointError,
        "a drafter of kind dflash, the server runs eagle3",
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
    return ServingSlot(Manifest.load(served.drafter), torch.float32, cuda=False)


@pytest.mark.usefixtures("unchecked")
def test_a_file_that_goes_bad_late_is_refused_by_the_scheduler(
    served: Served, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = changed(trained[0], tmp_path / "late", _poison)
    with ServerClient(served.url) as client, pytest.raises(SwapError, match=r"refused drafter v1.*v0 serves on"):
        swap_module.swap(client, folder, slot_of(served))
    assert checksums(served) == checksums_of(served.drafter)
    answers = served.ask(random_prompts(2, [9, 30], seed=24), 16)
    assert_greedy(served, answers, 16)
    assert {answer.meta["weight_version"] for answer in answers} == {"v0"}


@pytest.mark.usefixtures("unchecked")
def test_a_file_whose_tensors_do_not_fit_is_refused_whole(
    served: Served, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    """All but its last tensor would fit: none of them may reach the server."""
    folder = changed(trained[0], tmp_path / "late", _shrink)
    with ServerClient(served.url) as client, pytest.raises(SwapError, match=r"refused drafter v1.*v0 serves on"):
        swap_module.swap(client, folder, slot_of(served))
    assert checksums(served) == checksums_of(served.drafter)
    assert served.ask_one([20, 21, 22], 4).meta["weight_version"] == "v0"


@pytest.mark.usefixtures("unchecked")
def test_weights_that_are_not_the_expected_ones_are_said_and_mended(
    served: Served, trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is replaced by another sound one while it is sent: what serves then is no version that we know."""
    expected = server_checksums(load_file(trained[0] / "model.safetensors"), "eagle3", torch.float32, cuda=False)
    folder = changed(trained[0], tmp_path / "other", _touch)
    monkeypatch.setattr(swap_module, "server_checksums", lambda *args: expected)
    with ServerClient(served.url) as client, pytest.raises(SwapError, match=r"only in part.*restore v0"):
        swap_module.swap(client, folder, slot_of(served))
    monkeypatch.undo()
    assert checksums(served) != checksums_of(served.drafter)
    answers = served.ask(random_prompts(4, LENGTHS[:4], seed=25), 24)
    assert_greedy(served, answers, 24)
    assert {answer.meta["weight_version"] for answer in answers} == {"torn-v1"}
    served.worker.swap(served.drafter)
    assert checksums(served) == checksums_of(served.drafter)
    assert served.ask_one([20, 21, 22], 4).meta["weight_version"] == "v0"


def test_a_draft_vocabulary_of_other_tokens_is_carried_along(served: Served, tmp_path: Path) -> None:
    """Its drafts are the ones that the new checkpoint implies, its map is in the checksums, no output changes."""
    prompts = random_prompts(6, [9, 30], seed=27)
    plain = [answer.output for answer in served.ask(prompts, 16)]
    folder = made_for(tmp_path / "v9", served, prompts=random_prompts(9, [40], seed=99))
    old, new = (set(ids_of(path).tolist()) for path in (served.drafter, folder))
    assert len(new - old) > 20
    served.worker.swap(folder)
    assert checksums(served) == checksums_of(folder)
    answers = served.ask(prompts, 16)
    assert [answer.output for answer in answers] == plain
    drafted = {
        int(token) for record in served.records(answers) for step in record.verify_steps for token in step.draft_tokens
    }
    assert drafted <= new
    assert drafted - old
    served.worker.swap(served.drafter)
    assert checksums(served) == checksums_of(served.drafter)


def ids_of(folder: Path) -> torch.Tensor:
    return ids_from_offsets(load_file(folder / "model.safetensors")["d2t"])


def test_a_swap_that_was_killed_half_way_is_made_up_for(served: Served, trained: tuple[Path, Path]) -> None:
    """Its process died between pause and continue: the next swap frees the server, whose requests then go on."""
    prompt = random_prompts(1, [12], seed=28)[0]
    with ServerClient(served.url) as client, ThreadPoolExecutor(1) as pool:
        client.post("/pause_generation", {"mode": "in_place"})
        client.post("/begin_weight_update", {"selector": "draft"})
        waiting = pool.submit(served.ask_one, prompt, 16)
        assert served.worker.swap(trained[0]).report.checksum_ok
        assert waiting.result(timeout=60).output == served.target.greedy(prompt, 16)
    served.worker.swap(served.drafter)


def test_a_hundred_swaps_under_load(served: Served, trained: tuple[Path, Path]) -> None:
    """No error, no leak, every output the target's own."""
    stop = threading.Event()
    prompts = random_prompts(6, LENGTHS[:6], seed=29)
    plain = [served.target.greedy(prompt, 24) for prompt in prompts]
    scheduler = scheduler_of(served)

    def load(number: int) -> int:
        answered = 0
        while not stop.is_set() or not answered:
            assert served.ask_one(prompts[number], 24, "heldout").output == plain[number]
            answered += 1
        return answered

    def swap_often(times: int) -> None:
        for index in range(times):
            folder = (*trained, served.drafter)[index % 3]
            with ServerClient(served.url) as client:
                slot = ServingSlot(Manifest.load(served.drafter), torch.float32, cuda=False)
                assert swap_module.swap(client, folder, slot).checksum_ok

    with ThreadPoolExecutor(4) as pool:
        loops = [pool.submit(load, number) for number in range(4)]
        try:
            swap_often(24)  # caches fill: allocator arenas, the radix tree, compiled patterns
            before = scheduler.memory_info().rss
            swap_often(102)
            after = scheduler.memory_info().rss
        finally:
            stop.set()
        answered = sum(loop.result() for loop in loops)
    assert answered > 12
    assert after < 1.02 * before
    assert checksums(served) == checksums_of(served.drafter)


def scheduler_of(served: Served) -> psutil.Process:
    server = psutil.Process(served.worker._server._process.pid)  # type: ignore[union-attr]
    (scheduler,) = [p for p in server.children(recursive=True) if "scheduler" in " ".join(p.cmdline())]
    return scheduler
