"""What the fleets of this folder are asked."""

from __future__ import annotations

import pytest
from clients import Question, clear_questions
from tiny_llama import TinyTarget

ANSWER_TOKENS = 24


@pytest.fixture(scope="session")
def questions(target: TinyTarget) -> list[Question]:
    return clear_questions(target, 8, ANSWER_TOKENS, seed=7)
