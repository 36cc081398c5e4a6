"""Shared by the tests that need a target: a tiny random Llama, made once for the whole run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Plain modules that several test folders share; pytest's importlib mode puts nothing on the path by itself.
sys.path.insert(0, str(Path(__file__).parent / "support"))

from tiny_llama import TinyTarget, make_tiny_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    """Read-only: tests that change a target make their own."""
    return make_tiny_target(tmp_path_factory.mktemp("target") / "tiny-llama", seed=0)
