"""The online trainer: exact resume, averaged candidate, and that it learns a real (tiny) target."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import resource
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from draftloop.core.errors import CheckpointError
from draftloop.core.records import CaptureRecord
from draftloop.drafters.batch import Batch, collate
from draftloop.drafters.dflash import DflashDrafter
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.eagle1 import Eagle1Drafter, Eagle1Settings
from draftloop.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftloop.drafters.eagle3_loss import TttObjective, TttSettings, eagle3_loss
from draftloop.drafters.metrics import expected_accepted_length, prepare_holdout
from draftloop.drafters.online import OnlineSettings, OnlineTrainer, StepReport
from draftloop.drafters.target import FrozenTarget
from draftloop.drafters.vocab import VocabMove, move_vocab

from .conftest import DFLASH, EAGLE1, HIDDEN, TINY, VOCAB, make_record, shaken

SETTINGS = OnlineSettings(warmup_steps=3, ema_decay=0.9)
NEW_IDS = torch.tensor([0, 1, 2, 5, 8, 9, 11, 17, 19, 23, 27])
RECORDS = [make_record(20, 5, seed) for seed in range(6)]


def _trainer(draft_ids: torch.Tensor, frozen: FrozenTarget) -> OnlineTrainer:
    drafter = Eagle3Drafter.untrained(TINY, draft_ids, frozen.lm_head, None, seed=0)
    return OnlineTrainer(drafter, frozen, SETTINGS, seed=5)


def _steps(trainer: OnlineTrainer, count: int) -> list[StepReport]:
    reports = []
    for _ in range(count):
        pick = torch.randperm(len(RECORDS), generator=trainer.generator)[:2].tolist()
        reports.append(trainer.step(collate([RECORDS[i] for i in pick], 12, "cpu", trainer.generator)))
    return reports


def test_resume_is_bit_exact(draft_ids: torch.Tensor, frozen: FrozenTarget, tmp_path: Path) -> None:
    unbroken = _trainer(draft_ids, frozen)
    _steps(unbroken, 4)
    save_file(unbroken.state_dict(), tmp_path / "state.safetensors")
    expected = _steps(unbroken, 5)

    resumed = _trainer(draft_ids, frozen)
    resumed.load_state_dict(load_file(tmp_path / "state.safetensors"))
    assert _steps(resumed, 5) == expected
    for name, tensor in unbroken.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


def test_resume_goes_on_with_a_changed_vocabulary(draft_ids: torch.Tensor, frozen: FrozenTarget) -> None:
    unbroken, resumed = _trainer(draft_ids, frozen), _trainer(draft_ids, frozen)
    _steps(unbroken, 2)
    unbroken.change_vocabulary(move_vocab(draft_ids, NEW_IDS))
    resumed.load_state_dict(unbroken.state_dict())
    assert torch.equal(resumed.target.draft_head, frozen.lm_head[NEW_IDS])
    assert _steps(resumed, 2) == _steps(unbroken, 2)


def test_the_state_of_another_drafter_is_refused_untouched(draft_ids: torch.Tensor, frozen: FrozenTarget) -> None:
    trainer, other = _trainer(draft_ids, frozen), _trainer(draft_ids, frozen)
    state = other.state_dict()
    state["average.fc.weight"] = state["average.fc.weight"][:, 1:]
    before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"no average\.fc\.weight of shape"):
        trainer.load_state_dict(state)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.state_dict().items())


def test_loading_copies_the_saved_state(draft_ids: torch.Tensor, frozen: FrozenTarget) -> None:
    first, second = _trainer(draft_ids, frozen), _trainer(draft_ids, frozen)
    _steps(first, 2)
    second.load_state_dict(first.state_dict())
    before = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    _steps(second, 2)
    assert all(torch.equal(first.state_dict()[name], tensor) for name, tensor in before.items())


def test_another_vocabulary_keeps_what_was_learned_of_kept_tokens(
    draft_ids: torch.Tensor, frozen: FrozenTarget
) -> None:
    trainer = _trainer(draft_ids, frozen)
    _steps(trainer, 4)
    old, was = draft_ids.tolist(), trainer.candidate_state_dict()["lm_head.weight"]
    weight = trainer.drafter.lm_head.weight.detach().clone()
    names = ("exp_avg.lm_head.weight", "exp_avg_sq.lm_head.weight")
    moments = [trainer.state_dict()[name].clone() for name in names]
    trainer.change_vocabulary(move_vocab(draft_ids, NEW_IDS))
    assert torch.equal(trainer.drafter.draft_ids(), NEW_IDS)
    average = trainer.candidate_state_dict()["lm_head.weight"]
    after = [trainer.state_dict()[name] for name in names]
    for place, token in enumerate(NEW_IDS.tolist()):
        kept = token in old
        row = old.index(token) if kept else 0
        assert torch.equal(trainer.drafter.lm_head.weight[place], weight[row] if kept else frozen.lm_head[token])
        assert torch.equal(average[place], was[row] if kept else frozen.lm_head[token])
        for before, moved in zip(moments, after, strict=True):
            assert torch.equal(moved[place], before[row] if kept else torch.zeros(weight.shape[1]))
    # The loss is taught by the new map's rows of the target, as in a trainer that was born with it.
    assert torch.equal(trainer.target.draft_head, frozen.lm_head[NEW_IDS])
    twin = copy.deepcopy(trainer.drafter)
    born = OnlineTrainer(twin, FrozenTarget.of(frozen.embedding, frozen.lm_head, NEW_IDS), SETTINGS, seed=5)
    batch = collate(RECORDS[:2], 12, "cpu")
    assert trainer.step(batch).loss == born.step(batch).loss


def test_only_a_vocabulary_of_its_own_can_change(whole: FrozenTarget) -> None:
    trainer = OnlineTrainer(Eagle1Drafter.untrained(EAGLE1, seed=1), whole, SETTINGS, seed=5)
    with pytest.raises(TypeError, match="no draft vocabulary"):
        trainer.change_vocabulary(move_vocab(torch.tensor([1]), torch.tensor([2])))


def test_warm_up_then_constant(draft_ids: torch.Tensor, frozen: FrozenTarget) -> None:
    rates = [report.learning_rate for report in _steps(_trainer(draft_ids, frozen), 5)]
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3, 1e-3])


def test_the_cosine_ends_at_zero(draft_ids: torch.Tensor, frozen: FrozenTarget) -> None:
    settings = OnlineSettings(learning_rate=2.0, warmup_steps=2, cosine_steps=4)
    drafter = Eagle3Drafter.untrained(TINY, draft_ids, frozen.lm_head, None, seed=0)
    rates = [report.learning_rate for report in _steps(OnlineTrainer(drafter, frozen, settings, seed=0), 6)]
    half = 2**-0.5
    assert rates == pytest.approx([1.0, 1 + half, 1.0, 1 - half, 0.0, 0.0])


def _of_kind(kind: str, frozen: FrozenTarget, draft_ids: torch.Tensor) -> tuple[Drafter, FrozenTarget]:
    torch.manual_seed(3)
    if kind == "eagle3":
        return shaken(Eagle3Drafter.untrained(TINY, draft_ids, frozen.lm_head, None, seed=0)), frozen
    whole = FrozenTarget.of(frozen.embedding, frozen.lm_head, None)
    if kind == "eagle1":
        return shaken(Eagle1Drafter.untrained(EAGLE1, seed=0)), whole
    return shaken(DflashDrafter.untrained(DFLASH, None, seed=0)), whole


def _batches(kind: str, count: int) -> list[Batch]:
    layers = 2 if kind == "dflash" else 3
    records = [make_record(8 + 3 * i, 2 + i, i, layers=layers) for i in range(2 * count)]
    return [collate(records[2 * i : 2 * i + 2], 64, "cpu") for i in range(count)]


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "dflash"])
def test_every_kind_trains(kind: str, frozen: FrozenTarget, draft_ids: torch.Tensor) -> None:
    drafter, target = _of_kind(kind, frozen, draft_ids)
    settings = OnlineSettings(learning_rate=3e-3, feature=Eagle1Settings(noise=0.0))
    trainer = OnlineTrainer(drafter, target, settings, seed=0)
    (batch,) = _batches(kind, 1)
    losses = [trainer.step(batch).loss for _ in range(60)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_accumulated_batches_are_one_large_batch(kind: str, frozen: FrozenTarget, draft_ids: torch.Tensor) -> None:
    """EAGLE-3 draws nothing, and DFlash takes every anchor: so the two must agree."""
    layers = 2 if kind == "dflash" else 3
    records = [make_record(8 + 3 * i, 2 + i, i, layers=layers) for i in range(4)]
    states = []
    for groups in ([records], [records[:1], records[1:]]):
        drafter, target = _of_kind(kind, frozen, draft_ids)
        trainer = OnlineTrainer(drafter, target, OnlineSettings(), seed=0)
        for _ in range(3):
            report = trainer.step(*(collate(group, 64, "cpu") for group in groups))
        states.append((report, drafter.state_dict()))
    assert states[0][0].loss == pytest.approx(states[1][0].loss, rel=1e-5)
    assert states[0][0].step_accuracy == states[1][0].step_accuracy
    for name, tensor in states[0][1].items():
        torch.testing.assert_close(tensor, states[1][1][name], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "dflash"])
def test_packed_records_teach_as_one_at_a_time(kind: str, frozen: FrozenTarget, draft_ids: torch.Tensor) -> None:
    """No row sees another record's: loss, accuracy and new weights are those of a step over records by themselves."""
    layers = 2 if kind == "dflash" else 3
    records = [make_record(6 + 3 * i, 1 + 2 * i, i, layers=layers) for i in range(5)]
    packed = collate(records, 34, "cpu", packed=True)
    assert len(packed.lengths) == 2
    assert packed.num_tokens == sum(record.num_tokens for record in records)
    alone = [collate([record], 34, "cpu") for record in records]
    settings = OnlineSettings(feature=Eagle1Settings(noise=0.0))
    results = []
    for batches in ([packed], alone):
        drafter, target = _of_kind(kind, frozen, draft_ids)
        trainer = OnlineTrainer(drafter, target, settings, seed=0)
        results.append(([trainer.step(*batches) for _ in range(3)], drafter.state_dict()))
    for one, two in zip(results[0][0], results[1][0], strict=True):
        assert (one.loss, one.grad_norm) == pytest.approx((two.loss, two.grad_norm), rel=1e-4)
        assert (one.positions, one.tokens, one.step_accuracy) == (two.positions, two.tokens, two.step_accuracy)
    for name, tensor in results[0][1].items():
        torch.testing.assert_close(tensor, results[1][1][name], rtol=1e-3, atol=2e-5)


def test_segments_give_the_whole_gradient(
    draft_ids: torch.Tensor, frozen: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    (batch,) = _batches("eagle3", 1)
    grads = []
    for positions in (4096, 4):
        monkeypatch.setattr("draftloop.drafters.eagle3_loss._SEGMENT_POSITIONS", positions)
        drafter, _ = _of_kind("eagle3", frozen, draft_ids)
        assert isinstance(drafter, Eagle3Drafter)
        objective = TttObjective(drafter, frozen, TttSettings())
        plan = objective.plan(batch, torch.Generator())
        loss = objective.backward(batch, plan, plan.mass).loss
        grads.append([loss, *(p.grad for p in drafter.parameters())])
    whole, _ = _of_kind("eagle3", frozen, draft_ids)
    assert isinstance(whole, Eagle3Drafter)
    plain = eagle3_loss(whole, batch, frozen, TttSettings()).loss
    plain.backward()
    grads.append([plain.detach(), *(p.grad for p in whole.parameters())])
    for other in grads[1:]:
        torch.testing.assert_close(grads[0], other, rtol=1e-4, atol=1e-6)


def _shared_steps(trainer: OnlineTrainer, steps: list[list[Batch]], move: VocabMove | None) -> list[StepReport]:
    """Three steps, and a fourth with another vocabulary for a drafter that has one."""
    reports = [trainer.step(*batches) for batches in steps[:3]]
    if move is not None:
        trainer.change_vocabulary(move)
    return [*reports, trainer.step(*steps[3])]


def _held_bytes(trainer: OnlineTrainer) -> int:
    """Of weights, averages and moments, in this process."""
    kept = [*trainer.drafter.parameters(), *trainer._average.values()]
    for state in trainer._optimizer.state.values():
        kept += [state["exp_avg"], state["exp_avg_sq"]]
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in kept)


def _one_rank(rank: int, kind: str, folder: str, frozen: FrozenTarget, draft_ids: torch.Tensor) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    batches = _batches(kind, 8)
    mine = [[batches[2 * i + rank]] for i in range(4)]
    first, second = (OnlineTrainer(*_of_kind(kind, frozen, draft_ids), SETTINGS, 5, mesh) for _ in range(2))
    begun = [first.step(*mine[i]) for i in range(2)]
    state = first.state_dict()
    # A resumed group goes on bit for bit as the unbroken one.
    second.load_state_dict(state)
    assert first.step(*mine[2]) == second.step(*mine[2])
    resumed = second.state_dict()
    for name, tensor in first.state_dict().items():
        assert torch.equal(resumed[name], tensor), name
    trainer = OnlineTrainer(*_of_kind(kind, frozen, draft_ids), SETTINGS, 5, mesh)
    reports = _shared_steps(trainer, mine, move_vocab(draft_ids, NEW_IDS) if kind == "eagle3" else None)
    assert reports[:2] == begun
    save_file(trainer.candidate_state_dict(), f"{folder}/{rank}.safetensors")
    save_file(state, f"{folder}/state-{rank}.safetensors")
    said = {"reports": [dataclasses.asdict(report) for report in reports], "held": _held_bytes(trainer)}
    Path(f"{folder}/{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "dflash"])
def test_two_sharded_processes_match_one_step_for_step(
    kind: str, tmp_path: Path, frozen: FrozenTarget, draft_ids: torch.Tensor
) -> None:
    # FSDP2 imports it, for seconds: here once, not in every process of every case.
    importlib.import_module("torch._dynamo")
    # Forked, not spawned: pytest's test modules cannot be imported by name.
    mp.start_processes(_one_rank, (kind, str(tmp_path), frozen, draft_ids), nprocs=2, start_method="fork")
    batches = _batches(kind, 8)
    steps = [batches[2 * i : 2 * i + 2] for i in range(4)]
    trainer = OnlineTrainer(*_of_kind(kind, frozen, draft_ids), SETTINGS, seed=5)
    expected = _shared_steps(trainer, steps, move_vocab(draft_ids, NEW_IDS) if kind == "eagle3" else None)
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank in range(2):
        for one, two in zip(said[rank]["reports"], expected, strict=True):
            assert one["loss"] == pytest.approx(two.loss, rel=1e-5)
            assert (one["step"], one["tokens"], one["positions"]) == (two.step, two.tokens, two.positions)
            assert one["grad_norm"] == pytest.approx(two.grad_norm, rel=1e-4)
        state = load_file(tmp_path / f"{rank}.safetensors")
        for name, tensor in trainer.candidate_state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-6)
    # No byte is held twice, and neither process holds much more than half.
    assert said[0]["held"] + said[1]["held"] == _held_bytes(trainer)
    assert max(one["held"] for one in said) < 0.55 * _held_bytes(trainer)
    # What two processes saved, one goes on with.
    alone = OnlineTrainer(*_of_kind(kind, frozen, draft_ids), SETTINGS, seed=5)
    alone.load_state_dict(load_file(tmp_path / "state-0.safetensors"))
    assert alone.step(*steps[2]).loss == pytest.approx(expected[2].loss, rel=1e-5)


def _long_step(length: int, pipe: Connection) -> None:
    """Send what one EAGLE-3 step over `length` tokens adds to this process's memory, in MiB."""
    torch.set_num_threads(1)
    config = dataclasses.replace(TINY, num_heads=1, num_kv_heads=1, max_position_embeddings=length)
    ids = torch.arange(config.draft_vocab_size)
    frozen = FrozenTarget.of(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN), ids)
    drafter = Eagle3Drafter.untrained(config, ids, frozen.lm_head, None, seed=0)
    trainer = OnlineTrainer(drafter, frozen, OnlineSettings(ttt=TttSettings(steps=2)), seed=0)
    trainer.step(collate([make_record(8, 2, 0)], 8, "cpu"))
    batch = collate([make_record(length, 2, 0)], length, "cpu")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = trainer.step(batch)
    assert report.positions > length
    pipe.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def test_memory_does_not_grow_with_the_square_of_the_length() -> None:
    """One matrix of 16384 x 16384 scores would be 1 GiB."""
    context = mp.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_long_step, args=(16384, there))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert here.recv() < 256


def test_bfloat16_products_stay_near_single_precision(
    draft_ids: torch.Tensor, frozen: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the GPU does, on the CPU: autocast in the forward pass of every objective."""
    for kind in ("eagle1", "eagle3", "dflash"):
        norms = []
        for enabled in (False, True):
            cast = lambda device, on=enabled: torch.autocast("cpu", torch.bfloat16, enabled=on)  # noqa: E731
            for name in ("eagle1", "eagle3_loss", "dflash_loss"):
                monkeypatch.setattr(f"draftloop.drafters.{name}.mixed_precision", cast)
            drafter, target = _of_kind(kind, frozen, draft_ids)
            settings = OnlineSettings(feature=Eagle1Settings(noise=0.0))
            report = OnlineTrainer(drafter, target, settings, seed=0).step(*_batches(kind, 1))
            norms.append((report.loss, report.grad_norm))
            assert {p.dtype for p in drafter.parameters()} == {torch.float32}
        assert norms[0] == pytest.approx(norms[1], rel=0.1)
        assert norms[0] != norms[1]


def test_batches_that_teach_nothing_or_hold_nan_touch_no_weight(draft_ids: torch.Tensor, frozen: FrozenTarget) -> None:
    drafter = Eagle3Drafter.untrained(TINY, draft_ids, frozen.lm_head, None, seed=0)
    trainer = OnlineTrainer(drafter, frozen, OnlineSettings(), seed=0)
    before = trainer.drafter.state_dict()["fc.weight"].clone()
    prompt_only, broken = make_record(6, 50, 0), make_record(6, 2, 0)
    broken.fused[3] = np.nan
    for record in (prompt_only, broken):
        report = trainer.step(collate([record], 12, "cpu"))
        assert report.skipped
        assert report.step == 0
    assert torch.equal(trainer.drafter.fc.weight, before)
    assert not trainer.step(collate([make_record(6, 2, 0)], 12, "cpu")).skipped
    assert torch.isfinite(trainer.drafter.fc.weight).all()


def test_the_candidate_is_a_copy_of_the_average(draft_ids: torch.Tensor, frozen: FrozenTarget) -> None:
    trainer = _trainer(draft_ids, frozen)
    start = trainer.drafter.fc.weight.detach().clone()
    _steps(trainer, 1)
    # After one step the ramp's decay is 2/11.
    expected = torch.lerp(start, trainer.drafter.fc.weight.detach(), 1 - 2 / 11)
    torch.testing.assert_close(trainer.candidate_state_dict()["fc.weight"], expected)
    trainer.candidate_state_dict()["fc.weight"].zero_()
    assert trainer.candidate_state_dict()["fc.weight"].abs().sum() > 0


def test_training_raises_the_accepted_length_of_a_real_target() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {
        "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128, "initializer_range": 0.2,
        "rms_norm_eps": 1e-6,
    }  # fmt: skip
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**shape, bos_token_id=None, eos_token_id=None)
    ).eval()
    ids = torch.arange(64)
    config = Eagle3Config.for_target(shape, 64)
    records = _greedy_records(model, config.layer_ids)
    frozen = FrozenTarget.of(model.model.embed_tokens.weight, model.lm_head.weight, ids)
    drafter = Eagle3Drafter.untrained(config, ids, frozen.lm_head, model.model.norm.weight, seed=0)
    trainer = OnlineTrainer(drafter, frozen, OnlineSettings(learning_rate=5e-3), seed=0)
    holdout = prepare_holdout(records, frozen, 128, "cpu")
    before = expected_accepted_length(drafter, holdout, frozen, (1, 1, 1)).accept_length
    batch = collate(records, 128, "cpu")
    for _ in range(250):
        report = trainer.step(batch)
    after = expected_accepted_length(drafter, holdout, frozen, (1, 1, 1)).accept_length
    assert before < 1.6
    assert after > 3.0
    assert report.step_accuracy[0] > 0.8


@torch.no_grad()
def _greedy_records(model, layer_ids: tuple[int, ...]) -> list[CaptureRecord]:  # type: ignore[no-untyped-def]
    prompts = torch.randint(0, 64, (8, 6))
    tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=40, do_sample=False)
    states = model.model(tokens, output_hidden_states=True)
    # hidden_states[0] is the embedding, so the output of layer i is hidden_states[i + 1].
    fused = torch.cat([states.hidden_states[i + 1] for i in layer_ids], dim=-1)
    return [
        CaptureRecord(
            request_id=str(row),
            domain="tiny",
            start=0,
            prompt_len=6,
            token_ids=tokens[row].numpy().astype(np.int32),
            fused=fused[row].numpy(),
            last_hidden=states.last_hidden_state[row].numpy(),
        )
        for row in range(len(tokens))
    ]
