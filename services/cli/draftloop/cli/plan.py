"""`draftloop plan`: what a config puts on each GPU, in GiB, and whether it fits, before anything starts.

Weights are counted on the real modules, built without storage; caches follow from shapes. Activations are an estimate
from above (tests hold it against what autograd saves), and RESERVE is a round figure for what nobody can count ahead:
CUDA contexts, captured graphs, FlashInfer's workspace, fragmentation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from draftloop.core.config import Config
from draftloop.core.errors import ConfigError
from draftloop.drafters.device import serving_dtype
from draftloop.drafters.dflash import DflashConfig, DflashDrafter
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftloop.drafters.known_models import KNOWN_MODELS
from draftloop.drafters.target import read_target_config
from draftloop.sglang.target import SMOLLM2, resolve_target

GIB = 1 << 30
SERVER_RESERVE = 5.0
TRAINER_RESERVE = 2.0
# What SGLang takes for weights and cache when it is not told; the rest is for graphs and activations.
USUAL_MEM_FRACTION = 0.85
# fp32 weights, gradients, AdamW's two moments and the running average, which a training group shards; the weights and
# gradients of a step, which each of its processes has whole; then the two drafters that the gate compares.
TRAINED_BYTES = 20
GATHERED_BYTES = 8
COMPARED_BYTES = 8
# Positions or slots whose graph lives at a time (`eagle3_loss`, `dflash_loss`), and DFlash's anchors a sequence.
_SEGMENT = {"eagle3": 4096, "dflash": 8192}


@dataclass(frozen=True, slots=True)
class Item:
    """What takes memory. static: SGLang's weights and cache, which `server.mem_fraction` is about."""

    what: str
    gib: float
    static: bool = False


@dataclass(frozen=True, slots=True)
class CardPlan:
    """One GPU. problem: why it does not fit and what to change, None when it does."""

    card: int
    gib: float
    items: tuple[Item, ...]
    problem: str | None

    @property
    def total(self) -> float:
        return sum(item.gib for item in self.items)


@dataclass(frozen=True, slots=True)
class Use:
    """Of one GPU. serves: servers on it."""

    serves: int
    trains: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a target and its drafter. kv_bytes: of one token in both caches."""

    target: Mapping[str, Any]
    target_params: int
    drafter: Drafter
    drafter_params: int
    itemsize: int
    kv_bytes: int


def plan_cards(config: Config) -> list[CardPlan]:
    """One plan a GPU that is used, in order. Raises ConfigError in one line."""
    cards, gib = _hardware(config)
    uses = place(config, cards)
    sizes = sizes_of(config)
    return [_plan_card(card, gib, config, sizes, use) for card, use in enumerate(uses) if use.serves or use.trains]


def place(config: Config, cards: int) -> list[Use]:
    """What Ray puts where: workers one after the other on the first GPU with room for their share, then the
    training processes."""
    server_share = 1.0 if config.fleet.gpus_per_worker is None else config.fleet.gpus_per_worker
    trainer_share = 1.0 if config.fleet.trainer_gpus is None else config.fleet.trainer_gpus
    room, serves, trains = [1.0] * cards, [0] * cards, [False] * cards

    def take(share: float) -> int:
        card = next((card for card in range(cards) if room[card] >= share), None)
        if card is None:
            raise ConfigError(
                f"{config.fleet.workers} workers of {server_share:g} GPUs and {config.trainer.processes} training "
                f"processes of {trainer_share:g} do not go onto {cards} GPUs: lower their numbers or shares, or say "
                "more hardware.cards"
            )
        room[card] -= share
        return card

    for _ in range(config.fleet.workers):
        serves[take(server_share)] += 1
    for _ in range(config.trainer.processes * math.ceil(trainer_share)):
        trains[take(min(trainer_share, 1.0))] = True
    return [Use(*use) for use in zip(serves, trains, strict=True)]


def _hardware(config: Config) -> tuple[int, float]:
    """Number of GPUs and GiB of the smallest: the config's word, else torch's."""
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cards = config.hardware.cards or seen
    if config.hardware.card_gib is not None:
        return max(cards, 1), config.hardware.card_gib
    if seen == 0:
        raise ConfigError("there is no GPU here: say which ones to plan for with hardware.cards and hardware.card_gib")
    return cards, min(torch.cuda.get_device_properties(card).total_memory for card in range(seen)) / GIB


def target_shape(path: str) -> Mapping[str, Any]:
    """The parsed config.json of a local folder, else the numbers of a model we know by its folder's name."""
    if path == SMOLLM2 or (Path(path).expanduser() / "config.json").is_file():
        return read_target_config(resolve_target(path))
    known = KNOWN_MODELS.get(Path(path).name)
    if known is None:
        raise ConfigError(
            f"target {path!r} is no checkpoint folder here, and no model known by name ({', '.join(KNOWN_MODELS)}): "
            "copy its config.json into a folder and set target.path to it"
        )
    return known


def sizes_of(config: Config) -> Sizes:
    """Build target and drafter without storage and count."""
    from transformers import AutoConfig, AutoModelForCausalLM

    target = target_shape(config.target.path)
    itemsize = serving_dtype(config.target.dtype, cuda=True).itemsize
    try:
        with torch.device("meta"):
            drafter = _drafter(config, target)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**target))
    except (KeyError, ValueError) as err:
        raise ConfigError(f"the config.json of target {config.target.path!r} cannot be planned for: {err}") from None
    shape = drafter.shape
    own_layers = config.drafter.num_layers if config.drafter.kind == "dflash" else 1
    layers = int(target["num_hidden_layers"]) + own_layers
    return Sizes(
        target=target,
        target_params=_count(model),
        drafter=drafter,
        drafter_params=_count(drafter),
        itemsize=itemsize,
        kv_bytes=2 * layers * shape.num_kv_heads * shape.head_dim * itemsize,
    )


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _drafter(config: Config, target: Mapping[str, Any]) -> Drafter:
    wanted = config.drafter
    if wanted.kind == "dflash":
        mask = int(target["vocab_size"]) - 1
        return DflashDrafter(
            DflashConfig.for_target(
                target, mask, wanted.num_layers, wanted.block_size, wanted.layer_ids, wanted.intermediate_size
            )
        )
    size = min(wanted.draft_vocab_size, int(target["vocab_size"]))
    return Eagle3Drafter(Eagle3Config.for_target(target, size, wanted.layer_ids, wanted.intermediate_size))


def activation_bytes(drafter: Drafter, tokens: int, steps: int) -> int:
    """What a training step of `tokens` tokens keeps for its backward pass, fp32, from above."""
    shape = drafter.shape
    layer = 12 * shape.hidden_size + 6 * shape.qkv_width + 5 * shape.intermediate_size
    inputs = tokens * len(shape.layer_ids) * shape.hidden_size
    segment = _SEGMENT[drafter.kind]
    if isinstance(drafter, DflashDrafter):
        config = drafter.config
        slots = min(tokens * config.block_size, segment)
        return 4 * (
            inputs + config.num_layers * (slots * layer + tokens * (2 * shape.hidden_size + 4 * shape.qkv_width))
        )
    return 4 * (inputs + tokens * layer + min(tokens, segment) * steps * layer)


def _plan_card(card: int, gib: float, config: Config, sizes: Sizes, use: Use) -> CardPlan:
    items: list[Item] = []
    if use.serves:
        items += _serving_items(config, sizes)
    if use.trains:
        items += _training_items(config, sizes)
    return CardPlan(card, gib, tuple(items), _problem(card, gib, items, config, sizes, use))


def _serving_items(config: Config, sizes: Sizes) -> list[Item]:
    server, shape = config.server, sizes.drafter.shape
    widths = 2 * int(sizes.target["intermediate_size"]) + (8 + len(shape.layer_ids)) * shape.hidden_size
    verified = server.max_running_requests * server.num_draft_tokens
    return [
        Item("target weights", sizes.target_params * sizes.itemsize / GIB, static=True),
        Item("drafter weights", sizes.drafter_params * sizes.itemsize / GIB, static=True),
        Item("KV cache, target and drafter", server.max_total_tokens * sizes.kv_bytes / GIB, static=True),
        Item("prefill activations", server.chunked_prefill_size * widths * sizes.itemsize / GIB),
        # The model's logits, and the probabilities verification makes of them.
        Item("verification logits", verified * shape.vocab_size * (sizes.itemsize + 4) / GIB),
        Item("CUDA graphs, workspace, context", SERVER_RESERVE),
    ]


def _training_items(config: Config, sizes: Sizes) -> list[Item]:
    trainer, shape = config.trainer, sizes.drafter.shape
    # Embedding and head, fp32, and the head's rows of a reduced vocabulary.
    rows = 2 * shape.vocab_size + (config.drafter.draft_vocab_size if config.drafter.kind == "eagle3" else 0)
    trained = TRAINED_BYTES if trainer.processes == 1 else GATHERED_BYTES + TRAINED_BYTES / trainer.processes
    return [
        Item("training: weights, gradients, optimiser", sizes.drafter_params * trained / GIB),
        Item("training: the gate's two drafters", sizes.drafter_params * COMPARED_BYTES / GIB),
        Item("training: the target's embedding and head", rows * shape.hidden_size * 4 / GIB),
        Item("training: activations", activation_bytes(sizes.drafter, trainer.batch_tokens, trainer.ttt_steps) / GIB),
        Item("training: context, fragmentation", TRAINER_RESERVE),
    ]


def _problem(card: int, gib: float, items: list[Item], config: Config, sizes: Sizes, use: Use) -> str | None:
    total, static = sum(item.gib for item in items), sum(item.gib for item in items if item.static)
    if use.serves > 1:
        return f"card {card} would hold {use.serves} servers: raise fleet.gpus_per_worker above 0.5"
    if use.serves and use.trains and config.server.mem_fraction is None:
        return f"card {card} serves and trains: set server.mem_fraction, or SGLang takes nearly all of it"
    fraction = config.server.mem_fraction or USUAL_MEM_FRACTION
    if static > fraction * gib:
        cache = config.server.max_total_tokens * sizes.kv_bytes / GIB
        fitting = int((fraction * gib - (static - cache)) * GIB // sizes.kv_bytes)
        room = (
            f"card {card}: weights and KV cache take {static:.1f} GiB of the {fraction * gib:.1f} that SGLang may use"
        )
        if fitting < config.target.context_length:
            return f"{room}, and without the cache too little is left: use larger cards or a smaller target"
        return f"{room}: lower server.max_total_tokens to {fitting} or raise server.mem_fraction"
    rest, left = total - static, gib - fraction * gib if static else gib
    if rest > left:
        return (
            f"card {card}: {rest:.1f} GiB are needed beside weights and cache and {left:.1f} are left: lower "
            "server.mem_fraction, trainer.batch_tokens or server.max_running_requests, or train on other cards"
        )
    return None


def show(plans: list[CardPlan], config: Config, console: Console) -> bool:
    """Print a table for each kind of card and what the host needs; True when everything fits."""
    alike: dict[tuple[Item, ...], list[CardPlan]] = {}
    for plan in plans:
        alike.setdefault(plan.items, []).append(plan)
    for items, same in alike.items():
        table = Table("card " + ", ".join(str(plan.card) for plan in same), "GiB", box=None)
        for item in items:
            table.add_row(item.what, f"{item.gib:.2f}")
        table.add_row("sum", f"{same[0].total:.2f} of {same[0].gib:.1f}", style="bold")
        console.print(table)
    host = config.capture.ring_mib * config.fleet.workers + config.capture.buffer_mib
    console.print(f"host memory: {host / 1024:.1f} GiB for rings and replay buffer, beside the processes' own")
    problems = [plan.problem for plan in plans if plan.problem is not None]
    for problem in problems:
        console.print(f"[red]no[/] {problem}", soft_wrap=True)
    if not problems:
        console.print("[green]fits[/]")
    return not problems
