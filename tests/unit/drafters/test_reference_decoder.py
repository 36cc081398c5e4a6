"""The reference decoder: every system, greedy token by token and sampled by exact enumeration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from draftloop.drafters.dflash import DflashConfig, DflashDrafter
from draftloop.drafters.eagle1 import Eagle1Config, Eagle1Drafter
from draftloop.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftloop.drafters.proposers import DflashProposer, DrawTree, EagleProposer, Proposer, dynamic
from draftloop.drafters.reference_decoder import CachedTarget, decode, decode_plainly
from draftloop.drafters.target import FrozenTarget
from draftloop.drafters.tree import EAGLE1_TREE, DraftTree, chain, grow, rerank, static_tree, without_rerank

from .conftest import shaken
from .test_tree_and_verify import EveryChance

transformers = pytest.importorskip("transformers")

SHAPE: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 40, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
}  # fmt: skip
LAYERS = (0, 1, 2)
PROMPT = [3, 17, 9, 30, 5]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SHAPE, initializer_range=0.3, bos_token_id=None, eos_token_id=None)
    return transformers.LlamaForCausalLM(config).eval().double()


def _frozen(model: Any, draft_ids: torch.Tensor | None = None) -> FrozenTarget:
    return FrozenTarget.of(model.model.embed_tokens.weight, model.lm_head.weight, draft_ids)


def _eagle3(model: Any) -> Eagle3Drafter:
    torch.manual_seed(2)
    ids = torch.arange(0, 40, 2)
    config = Eagle3Config.for_target(SHAPE, len(ids), layer_ids=LAYERS)
    drafter = Eagle3Drafter.untrained(config, ids, model.lm_head.weight.float(), None, seed=0)
    return shaken(drafter).double()


def _by_confidence(propose: Any, root: int) -> DraftTree:
    return rerank(grow(propose, 3, 2, by="confidence"), root, 7)


def _without_rerank(propose: Any, root: int) -> DraftTree:
    return without_rerank(grow(propose, 3, 2), root, 7)


def _eagle1(model: Any, draw: DrawTree, shifted: bool = True) -> Proposer:
    torch.manual_seed(2)
    config = Eagle1Config.for_target(SHAPE)
    head = shaken(Eagle1Drafter.untrained(dataclasses.replace(config, shifted_token=shifted), seed=0)).double()
    return EagleProposer(head, _frozen(model), draw)


def _dflash(model: Any) -> Proposer:
    torch.manual_seed(2)
    config = DflashConfig.for_target(SHAPE, mask_token_id=1, num_layers=2, block_size=5, layer_ids=LAYERS)
    return DflashProposer(shaken(DflashDrafter.untrained(config, None, seed=0)).double(), _frozen(model))


SYSTEMS: dict[str, Callable[[Any], Proposer]] = {
    "EAGLE-1": lambda m: _eagle1(m, partial(static_tree, paths=EAGLE1_TREE)),
    "EAGLE-1 without shifted token": lambda m: _eagle1(m, partial(static_tree, paths=EAGLE1_TREE), shifted=False),
    "EAGLE-2": lambda m: _eagle1(m, dynamic(3, 3, 10)),
    "EAGLE-2 by confidence": lambda m: _eagle1(m, _by_confidence),
    "EAGLE-2 without rerank": lambda m: _eagle1(m, _without_rerank),
    "EAGLE-3": lambda m: EagleProposer(_eagle3(m), _frozen(m), dynamic(4, 3, 12)),
    "EAGLE-3 chain": lambda m: EagleProposer(_eagle3(m), _frozen(m), dynamic(4, 1, 5)),
    "DFlash": _dflash,
}


class Oracle:
    """Drafts what the target will say, right for `good` tokens and then wrong: the walk must go all the way."""

    def __init__(self, answer: tuple[int, ...], good: int) -> None:
        self._answer, self._good, self._seen = answer, good, 0

    def observe(self, fused: torch.Tensor, last_hidden: torch.Tensor, tokens: torch.Tensor) -> None:
        self._seen += len(tokens)

    def draft(self, root: int) -> DraftTree:
        place = self._seen - (len(PROMPT) - 1)
        ahead = [*self._answer[place : place + self._good], 0]
        return chain(torch.tensor(ahead), torch.zeros(len(ahead)), root)


@pytest.mark.parametrize("name", SYSTEMS)
def test_greedy_output_is_that_of_plain_decoding(model: Any, name: str) -> None:
    plain = decode_plainly(CachedTarget(model, LAYERS), PROMPT, 40)
    result = decode(CachedTarget(model, LAYERS), SYSTEMS[name](model), PROMPT, 40)
    assert result.tokens == plain
    assert len(result.accepted) + sum(result.accepted) + 1 >= 40


def test_a_perfect_drafter_is_believed(model: Any) -> None:
    plain = decode_plainly(CachedTarget(model, LAYERS), PROMPT, 41)
    result = decode(CachedTarget(model, LAYERS), Oracle(plain, 3), PROMPT, 41)
    assert result.tokens == plain
    assert set(result.accepted) <= {3, 4}
    assert result.accept_length >= 4.0
    assert result.acceptance(1) == (len(result.accepted),) * 2


def test_generation_ends_with_the_end_token(model: Any) -> None:
    plain = decode_plainly(CachedTarget(model, LAYERS), PROMPT, 20)
    end = plain[7]
    stop = plain.index(end) + 1
    result = decode(CachedTarget(model, LAYERS), Oracle(plain, 3), PROMPT, 20, end_ids=[end])
    assert result.tokens == plain[:stop] == decode_plainly(CachedTarget(model, LAYERS), PROMPT, 20, end_ids=[end])


def test_drafts_are_the_unroll_of_training(model: Any) -> None:
    """Along a chain the proposer says what `forward` says of the same tokens at once."""
    drafter, frozen = _eagle3(model), _frozen(model)
    proposer = EagleProposer(drafter, frozen, dynamic(3, 1, 4))
    rows = CachedTarget(model, LAYERS).prefill(torch.tensor(PROMPT))
    follow = torch.tensor([*PROMPT[1:], 6])
    for part in (slice(0, 2), slice(2, 3), slice(3, 5)):
        proposer.observe(rows.fused[part].detach(), rows.last_hidden[part].detach(), follow[part])
    tree = proposer.draft(6)
    embedded = frozen.embedding[torch.cat((follow, tree.tokens[1:3]))]
    features = drafter(rows.fused[None].detach(), embedded[None], torch.tensor([[len(PROMPT) - 1]]), 3)
    best = [int(drafter.draft_ids()[drafter.logits(f[0, 0]).argmax()]) for f in features]
    assert tree.tokens[1:].tolist() == best
    values = torch.stack([drafter.logits(f[0, 0]).log_softmax(-1).max() for f in features]).cumsum(0)
    torch.testing.assert_close(tree.log_values[1:], values.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["EAGLE-2", "EAGLE-3", "DFlash"])
def test_the_sampled_law_is_the_targets_by_enumeration(model: Any, name: str) -> None:
    """Three tokens: every path of chance above 2e-4, against the target's own chain rule."""
    length, temperature = 3, 0.25
    law: dict[tuple[int, ...], float] = {}
    stack: list[list[int]] = [[]]
    while stack:
        script = stack.pop()
        chance = Enumerated(script)
        tokens = decode(
            CachedTarget(model, LAYERS), SYSTEMS[name](model), PROMPT, length, (), chance, temperature
        ).tokens
        law[tokens] = law.get(tokens, 0.0) + chance.weight
        stack.extend(chance.siblings)
    total = sum(law.values())
    assert total > 0.99
    assert len(law) > 30
    for tokens, weight in law.items():
        states = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1].detach()
        exact = float((states / temperature).softmax(-1).gather(1, torch.tensor(tokens)[:, None]).prod())
        # What is missing is branches too unlikely to be visited; nothing may be too likely.
        assert exact - (1.0 - total) <= weight + 1e-9
        assert weight <= exact + 1e-9


class Enumerated(EveryChance):
    """Follows a script, then the likeliest branch; the other branches worth visiting are `siblings`."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(script)
        self.siblings: list[list[int]] = []

    def _decide(self, probabilities: list[float]) -> int:
        place, before = len(self.taken), self.weight
        best = max(range(len(probabilities)), key=lambda i: probabilities[i])
        choice = self.script[place] if place < len(self.script) else best
        if place >= len(self.script):
            others = (i for i, p in enumerate(probabilities) if i != best and before * p > 2e-4)
            self.siblings.extend([*self.taken, other] for other in others)
        self.taken.append(choice)
        self.weight *= probabilities[choice]
        return choice
