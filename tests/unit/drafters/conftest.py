"""Small drafters, targets and records for the drafter tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import pytest
import torch

from draftloop.core.manifest import TargetIdentity
from draftloop.core.records import CaptureRecord
from draftloop.drafters.dflash import DflashConfig, DflashDrafter
from draftloop.drafters.drafter import Drafter, Shape
from draftloop.drafters.eagle1 import Eagle1Config, Eagle1Drafter
from draftloop.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftloop.drafters.target import FrozenTarget

VOCAB = 29
HIDDEN = 12
TINY = Eagle3Config(
    hidden_size=HIDDEN,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=16,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    vocab_size=VOCAB,
    draft_vocab_size=11,
    layer_ids=(0, 1, 2),
    max_position_embeddings=64,
)
_LAYER = {
    field.name: getattr(TINY, field.name)
    for field in dataclasses.fields(Shape)
    if field.name not in ("layer_ids", "draft_vocab_size")
}
EAGLE1 = Eagle1Config(**_LAYER, layer_ids=())
BLOCK = 4
DFLASH = DflashConfig(**_LAYER, layer_ids=(0, 2), num_layers=2, block_size=BLOCK, mask_token_id=7, num_target_layers=4)


DrafterT = TypeVar("DrafterT", bound=Drafter)


@torch.no_grad()
def shaken(drafter: DrafterT) -> DrafterT:
    """Every weight moved, so that no term of a formula is a coincidence."""
    for parameter in drafter.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    return drafter


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def draft_ids() -> torch.Tensor:
    return torch.tensor([0, 2, 3, 5, 8, 11, 13, 17, 19, 23, 28])


@pytest.fixture
def drafter(draft_ids: torch.Tensor) -> Eagle3Drafter:
    drafter = Eagle3Drafter.untrained(TINY, draft_ids, torch.randn(VOCAB, HIDDEN), torch.rand(HIDDEN) + 0.5, seed=1)
    return shaken(drafter)


@pytest.fixture
def eagle1() -> Eagle1Drafter:
    return shaken(Eagle1Drafter.untrained(EAGLE1, seed=1))


@pytest.fixture
def dflash() -> DflashDrafter:
    return shaken(DflashDrafter.untrained(DFLASH, torch.rand(HIDDEN) + 0.5, seed=1))


@pytest.fixture
def frozen(draft_ids: torch.Tensor) -> FrozenTarget:
    return FrozenTarget.of(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN), draft_ids)


@pytest.fixture
def whole(frozen: FrozenTarget) -> FrozenTarget:
    """The same target for drafters that speak the whole vocabulary."""
    return FrozenTarget.of(frozen.embedding, frozen.lm_head, None)


@pytest.fixture
def identity() -> TargetIdentity:
    return TargetIdentity(
        name="tiny",
        fingerprint="f" * 64,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        num_layers=4,
        tokenizer_sha256="a" * 64,
        chat_template_sha256="b" * 64,
    )


def make_record(
    tokens: int, prompt_len: int, seed: int, domain: str = "chat", start: int = 0, layers: int = 3
) -> CaptureRecord:
    rng = np.random.default_rng(seed)
    return CaptureRecord(
        request_id=str(seed),
        domain=domain,
        start=start,
        prompt_len=prompt_len,
        token_ids=rng.integers(0, VOCAB, tokens).astype(np.int32),
        fused=rng.standard_normal((tokens, layers * HIDDEN)).astype(np.float32),
        last_hidden=rng.standard_normal((tokens, HIDDEN)).astype(np.float32),
    )
