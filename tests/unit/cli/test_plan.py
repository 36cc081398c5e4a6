"""The memory plan: counts equal real modules, activations bound what autograd keeps, what does not fit is one line."""

from __future__ import annotations

import io
import json
import weakref
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_llama import HIDDEN, LAYERS, VOCAB, TinyTarget
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from draftloop.cli.doctor import compiler, examine
from draftloop.cli.main import app
from draftloop.cli.plan import activation_bytes, place, plan_cards, show, sizes_of, target_shape
from draftloop.core.config import Config, FleetConfig, load_config
from draftloop.core.errors import ConfigError
from draftloop.core.records import CaptureRecord
from draftloop.drafters.batch import Batch, collate
from draftloop.drafters.dflash import DflashConfig, DflashDrafter
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftloop.drafters.eagle3_loss import TttSettings
from draftloop.drafters.online import OnlineSettings, OnlineTrainer
from draftloop.drafters.target import FrozenTarget

CONFIGS = Path(__file__).resolve().parents[3] / "infra" / "configs"
SHIPPED = sorted(CONFIGS.glob("*.yaml"))
SMALL = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
         "max_position_embeddings": 512}  # fmt: skip


def planned(*overrides: str) -> Config:
    return load_config(CONFIGS / "qwen3-8b-1xH200.yaml", overrides)


@pytest.mark.parametrize(("name", "count"), [("Qwen3-8B", 8_190_735_360), ("Llama-3.1-8B-Instruct", 8_030_261_248)])
def test_known_models_have_their_published_sizes(name: str, count: int) -> None:
    assert sizes_of(planned(f"target.path=/nowhere/{name}")).target_params == count


def test_a_local_checkpoint_is_counted_as_it_is(target: TinyTarget) -> None:
    sizes = sizes_of(planned(f"target.path={target.folder}", "target.dtype=float32"))
    model = LlamaForCausalLM.from_pretrained(target.folder)
    assert sizes.target_params == sum(p.numel() for p in model.parameters())
    # Keys and values, 2 heads of 16, in fp32, of the target's layers and the drafter's one.
    assert sizes.kv_bytes == 2 * (LAYERS + 1) * 2 * 16 * 4
    drafter = Eagle3Drafter(Eagle3Config.for_target(target_shape(str(target.folder)), VOCAB))
    assert sizes.drafter_params == sum(p.numel() for p in drafter.parameters())
    assert sizes.drafter.shape.hidden_size == HIDDEN


class Kept:
    """A tensor that autograd holds on to."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def most_bytes_kept(trainer: OnlineTrainer, batch: Batch) -> int:
    """The most that the graphs of one step hold at a time, each storage once, weights and target aside."""
    given = {x.untyped_storage().data_ptr() for x in (*trainer.drafter.parameters(), *vars(trainer.target).values())}
    alive: weakref.WeakSet[Kept] = weakref.WeakSet()
    most = 0

    def pack(tensor: torch.Tensor) -> Kept:
        nonlocal most
        kept = Kept(tensor)
        alive.add(kept)
        storages = {k.tensor.untyped_storage().data_ptr(): k.tensor.untyped_storage().nbytes() for k in alive}
        most = max(most, sum(size for place, size in storages.items() if place not in given))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        trainer.step(batch)
    return most


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
@pytest.mark.parametrize(("tokens", "steps"), [(64, 1), (64, 5), (300, 3)])
def test_activations_are_estimated_from_above_and_not_wildly(kind: str, tokens: int, steps: int) -> None:
    torch.manual_seed(0)
    head = torch.randn(300, 64)
    ids = torch.arange(128)
    drafter: Drafter
    if kind == "eagle3":
        drafter = Eagle3Drafter.untrained(Eagle3Config.for_target(SMALL, 128), ids, head, None, 0)
    else:
        drafter = DflashDrafter.untrained(DflashConfig.for_target(SMALL, 5, num_layers=2, block_size=8), None, 0)
    frozen = FrozenTarget.of(torch.randn(300, 64), head, ids if kind == "eagle3" else None)
    trainer = OnlineTrainer(drafter, frozen, OnlineSettings(ttt=TttSettings(steps=steps)), seed=0)
    width = len(drafter.shape.layer_ids) * 64
    record = CaptureRecord(
        request_id="r", domain="d", start=0, prompt_len=1,
        token_ids=torch.randint(0, 300, (tokens,), dtype=torch.int32).numpy(),
        fused=torch.randn(tokens, width).numpy(), last_hidden=torch.randn(tokens, 64).numpy(),
    )  # fmt: skip
    batch = collate([record], tokens, "cpu")
    kept = most_bytes_kept(trainer, batch)
    assert kept <= activation_bytes(drafter, tokens, steps) <= 3 * kept


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_fit(path: Path) -> None:
    config = load_config(path)
    plans = plan_cards(config)
    assert [plan.card for plan in plans] == list(range(config.hardware.cards or 0))
    assert [plan.problem for plan in plans] == [None] * len(plans)
    assert all(plan.total < plan.gib for plan in plans)
    printed = io.StringIO()
    assert show(plans, config, Console(file=printed, width=120))
    assert "target weights" in printed.getvalue()
    assert printed.getvalue().endswith("fits\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="what the doctor says where there is no GPU")
def test_the_doctor_checks_a_shipped_config() -> None:
    """Here there is neither the GPU nor the checkpoint; both are said, and the plan stands all the same."""
    found = examine(load_config(CONFIGS / "qwen3-8b-8xH200.yaml"))
    cards = [finding for finding in found if finding.what.startswith("card ")]
    assert [card.ok for card in cards] == [True] * 8
    wrong = {finding.what: finding.detail for finding in found if finding.ok is False}
    assert "sees no GPU" in wrong["device"]
    assert "/models/Qwen3-8B" in wrong["target"]


def test_the_doctor_looks_for_the_compiler_that_flashinfer_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert compiler().ok is False
    assert "CUDA_HOME" in compiler().detail
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert compiler().ok is True


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["server.max_total_tokens=2000000"], "lower server.max_total_tokens to"),
        (["hardware.card_gib=24", "server.mem_fraction=0.6"], "use larger cards or a smaller target"),
        (["server.mem_fraction=0.9"], "train on other cards"),
        (["server.mem_fraction=null"], "set server.mem_fraction"),
        (["fleet.workers=2", "fleet.gpus_per_worker=0.25"], "would hold 2 servers"),
        (["trainer.batch_tokens=65536", "drafter.kind=dflash", "hardware.card_gib=80"], "card 0"),
    ],
)
def test_what_does_not_fit_is_one_line_that_says_what_to_change(overrides: list[str], says: str) -> None:
    (plan,) = plan_cards(planned(*overrides))
    assert plan.problem is not None
    assert says in plan.problem
    assert "\n" not in plan.problem


@pytest.mark.parametrize(
    ("fleet", "serves", "trains"),
    [
        ((1, 0.5, 0.5), [1, 0], [True, False]),
        ((1, 1.0, 1.0), [1, 0], [False, True]),
        ((1, 0.6, 0.5), [1, 0], [False, True]),
        ((2, 0.5, 0.5), [2, 0], [False, True]),
        ((1, None, None), [1, 0], [False, True]),
    ],
)
def test_workers_and_trainer_go_where_ray_has_room(
    fleet: tuple[int, float | None, float | None], serves: list[int], trains: list[bool]
) -> None:
    config = Config(fleet=FleetConfig(workers=fleet[0], gpus_per_worker=fleet[1], trainer_gpus=fleet[2]))
    uses = place(config, 2)
    assert [use.serves for use in uses] == serves
    assert [use.trains for use in uses] == trains


def test_a_training_group_takes_a_gpu_for_each_process_and_shards_what_stays() -> None:
    def trained(*overrides: str) -> list[float]:
        plans = plan_cards(planned("hardware.cards=5", "fleet.gpus_per_worker=1", "fleet.trainer_gpus=1", *overrides))
        items = [item for plan in plans for item in plan.items]
        return [item.gib for item in items if item.what == "training: weights, gradients, optimiser"]

    (alone,), group = trained(), trained("trainer.processes=4")
    assert group == pytest.approx([alone * (8 + 20 / 4) / 20] * 4)


def test_the_suggested_cache_fits() -> None:
    (plan,) = plan_cards(planned("server.max_total_tokens=2000000"))
    assert plan.problem is not None
    suggested = plan.problem.split("max_total_tokens to ")[1].split()[0]
    (again,) = plan_cards(planned(f"server.max_total_tokens={suggested}"))
    assert again.problem is None


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["fleet.workers=2"], "do not go onto 1 GPUs"),
        (["fleet.trainer_gpus=2", "hardware.cards=2"], "do not go onto 2 GPUs"),
        (["target.path=/models/Unheard-Of"], "no model known by name"),
        (["hardware.cards=null", "hardware.card_gib=null"], "hardware.card_gib"),
    ],
)
def test_what_cannot_be_planned_is_one_line(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        plan_cards(planned(*overrides))
    assert "\n" not in str(caught.value)


def test_a_config_json_that_no_model_fits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "no_such_model"}), encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be planned for"):
        plan_cards(planned(f"target.path={tmp_path}"))


def test_the_command_ends_with_2_when_it_does_not_fit() -> None:
    arguments = ["plan", "--config", str(CONFIGS / "qwen3-8b-1xH200.yaml")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert CliRunner().invoke(app, [*arguments, "--set", "server.mem_fraction=0.05"]).exit_code == 2
