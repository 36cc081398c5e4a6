"""Clients of a fleet under test: greedy requests through the router, each answer compared with plain decoding's."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import httpx
from tiny_llama import TinyTarget, random_prompts

# Of the two best logits at each position; a smaller one may fall either way in another batch shape.
CLEAR_GAP = 1e-3
REQUEST_TIMEOUT_S = 120.0
PAUSE_AFTER_FAILURE_S = 0.3


@dataclass(frozen=True)
class Question:
    """A prompt and what plain greedy decoding by transformers says to it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def clear_questions(target: TinyTarget, count: int, tokens: int, seed: int) -> list[Question]:
    """Questions whose answers hang on no near tie."""
    found: list[Question] = []
    for prompt in random_prompts(4 * count, [8, 12, 20], seed):
        answer = target.greedy(prompt, tokens)
        logits = target.states([*prompt, *answer]).logits[len(prompt) - 1 : -1]
        best = logits.topk(2).values
        if float((best[:, 0] - best[:, 1]).min()) > CLEAR_GAP:
            found.append(Question(tuple(prompt), tuple(answer)))
        if len(found) == count:
            return found
    raise ValueError(f"only {len(found)} of {count} questions have a clear answer")


@dataclass
class Outcome:
    """ok: right answers.  failed: by status code, or by the error's name when there was no answer."""

    ok: int = 0
    wrong: int = 0
    failed: Counter[str] = field(default_factory=Counter)

    @property
    def failures(self) -> int:
        return sum(self.failed.values())


class Clients:
    """A context manager: `count` clients, each asking the next question when it has its answer."""

    def __init__(self, router: str, questions: Sequence[Question], count: int) -> None:
        self._url = f"{router}/generate"
        self._questions = itertools.cycle(questions)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(count)]
        self.outcome = Outcome()

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
            while not self._stopping.is_set():
                with self._lock:
                    question = next(self._questions)
                self._note(question, *self._answer(client, question))

    def _answer(self, client: httpx.Client, question: Question) -> tuple[list[int] | None, str]:
        parameters = {"temperature": 0.0, "max_new_tokens": len(question.answer), "ignore_eos": True}
        body = {"input_ids": list(question.prompt), "sampling_params": parameters}
        try:
            response = client.post(self._url, json=body)
        except httpx.HTTPError as error:
            return None, type(error).__name__
        if response.status_code != httpx.codes.OK:
            return None, str(response.status_code)
        return response.json()["output_ids"], ""

    def _note(self, question: Question, answer: list[int] | None, failure: str) -> None:
        with self._lock:
            if answer is None:
                self.outcome.failed[failure] += 1
            elif tuple(answer) == question.answer:
                self.outcome.ok += 1
            else:
                self.outcome.wrong += 1
        if answer is None:
            time.sleep(PAUSE_AFTER_FAILURE_S)
