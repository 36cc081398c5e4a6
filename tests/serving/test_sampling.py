"""What a speculative server samples is what the target says: its law, its penalties, its grammar, its logprobs.

One server a drafting form (tree, chain, DFLASH), each with an untrained drafter and a target of ten tokens, so that
every answer of three tokens can be enumerated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from scipy.stats import chi2
from tiny_llama import TinyTarget, make_few_words_target
from torch import Tensor

from draftloop.core.config import Config
from draftloop.fleet.worker import Worker
from draftloop.trainer.day0 import make_untrained

from .conftest import CONFIG

WORDS = 10
TOKENS = 3
# The chance of a false alarm, each test.
ALPHA = 1e-5
FORMS = {
    "tree": {"drafter.kind": "eagle3", "server.topk": 4, "server.num_draft_tokens": 8, "server.num_steps": 3},
    "chain": {"drafter.kind": "eagle3", "server.topk": 1, "server.num_draft_tokens": 4, "server.num_steps": 3},
    "dflash": {"drafter.kind": "dflash", "drafter.block_size": 4, "drafter.num_layers": 1},
}
PROMPT = [3, 7, 1, 4, 4, 9, 2]


@dataclass
class Server:
    """A running server and its target."""

    url: str
    target: TinyTarget

    def ask(self, count: int, tokens: int, **sampling: Any) -> list[dict[str, Any]]:
        """`count` answers to PROMPT, in batches."""
        body = {
            "input_ids": [PROMPT] * count,
            "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, **sampling},
            "return_logprob": count == 1,
        }
        response = httpx.post(f"{self.url}/generate", json=body, timeout=300, trust_env=False)
        response.raise_for_status()
        answers: list[dict[str, Any]] = response.json()
        return answers


@pytest.fixture(scope="module", params=FORMS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(request.param)
    target = make_few_words_target(folder / "target", seed=11, words=WORDS)
    raw = CONFIG.model_dump()
    for dotted, value in FORMS[request.param].items():
        section, key = dotted.split(".")
        raw[section][key] = value
    config = Config.model_validate(raw)
    make_untrained(target.folder, config.drafter, [range(WORDS)], folder / "v0", "v0", seed=0)
    worker = Worker(target.folder, config, folder / "server.log")
    try:
        yield Server(worker.start(folder / "v0"), target)
    finally:
        worker.stop()


def kept(probs: Tensor, top_k: int = WORDS, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """[V] the sampling filters by their definitions, each on the whole distribution; one token at a time."""
    allowed = torch.zeros_like(probs)
    mass = 0.0
    for rank, token in enumerate(probs.argsort(descending=True).tolist()):
        if rank < top_k and mass <= top_p and probs[token] >= min_p * probs.max():
            allowed[token] = probs[token]
        mass += float(probs[token])
    return allowed / allowed.sum()


def law(target: TinyTarget, temperature: float, **filters: Any) -> dict[tuple[int, ...], float]:
    """The probability of every answer of TOKENS tokens to PROMPT, from plain forwards."""
    answers = {(): 1.0}
    for _ in range(TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for answer, probability in answers.items():
            logits = target.states([*PROMPT, *answer]).logits[-1].double()
            following = kept(torch.softmax(logits / temperature, -1), **filters)
            longer |= {(*answer, token): probability * float(p) for token, p in enumerate(following) if p > 0}
        answers = longer
    return answers


def surprise(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """The chi-square test's p-value; answers expected fewer than five times are one cell."""
    total = sum(counts.values())
    common = [answer for answer, p in expected.items() if p * total >= 5]
    seen = np.array([*(counts[answer] for answer in common), total - sum(counts[answer] for answer in common)])
    wanted = np.array([*(expected[answer] * total for answer in common), 0.0])
    wanted[-1] = total - wanted.sum()
    if wanted[-1] < 5:
        seen, wanted = np.array([*seen[:-2], seen[-2:].sum()]), np.array([*wanted[:-2], wanted[-2:].sum()])
    return float(chi2.sf(((seen - wanted) ** 2 / wanted).sum(), len(wanted) - 1))


@pytest.mark.parametrize(
    ("samples", "sampling"),
    [
        (1200, {"temperature": 2.0}),
        (1000, {"temperature": 2.5, "top_k": 5, "top_p": 0.8}),
        (700, {"temperature": 2.5, "min_p": 0.15, "top_p": 0.95}),
    ],
    ids=["temperature", "top-k and top-p", "min-p"],
)
def test_sampled_answers_have_the_targets_law(server: Server, samples: int, sampling: dict[str, Any]) -> None:
    expected = law(server.target, **sampling)
    assert len(expected) > 20
    answers = Counter(tuple(answer["output_ids"]) for answer in server.ask(samples, TOKENS, **sampling))
    assert set(answers) <= set(expected)
    assert surprise(answers, expected) > ALPHA


def test_a_wrong_law_would_be_noticed(server: Server) -> None:
    expected = law(server.target, 2.0)
    answers = Counter(tuple(answer["output_ids"]) for answer in server.ask(500, TOKENS, temperature=1.2))
    assert surprise(answers, expected) < ALPHA


@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 0.7}, {"presence_penalty": 1.5}, {"repetition_penalty": 1.4}],
    ids=lambda penalty: next(iter(penalty)),
)
def test_penalties_are_those_of_plain_decoding(server: Server, penalty: dict[str, float]) -> None:
    tokens = 24
    plain, (answer, *_) = server.ask(1, tokens, temperature=0.0)[0], server.ask(2, tokens, temperature=0.0, **penalty)
    assert plain["output_ids"] == penalised(server.target, tokens)
    assert answer["output_ids"] == penalised(server.target, tokens, **penalty)
    assert answer["output_ids"] != plain["output_ids"]


def penalised(
    target: TinyTarget,
    tokens: int,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
) -> list[int]:
    """Greedy decoding with penalties over the output so far, by their definitions."""
    output: list[int] = []
    for _ in range(tokens):
        logits = target.states([*PROMPT, *output]).logits[-1].clone()
        for token, count in Counter(output).items():
            logits[token] -= frequency_penalty * count + presence_penalty
            logits[token] = (
                logits[token] * repetition_penalty if logits[token] < 0 else logits[token] / repetition_penalty
            )
        output.append(int(logits.argmax()))
    return output


def test_logprobs_are_the_targets(server: Server) -> None:
    answer = server.ask(1, 20, temperature=0.0)[0]
    logits = server.target.states([*PROMPT, *answer["output_ids"]]).logits[len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits.double(), -1)
    found = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in found] == answer["output_ids"]
    for row, (value, token, _) in zip(expected, found, strict=True):
        assert value == pytest.approx(float(row[token]), abs=1e-3)
