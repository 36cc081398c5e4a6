"""Small drafters, targets and records for the drafter tests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from draftloop.core.manifest import TargetIdentity
from draftloop.core.records import CaptureRecord
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
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return drafter


@pytest.fixture
def frozen(draft_ids: torch.Tensor) -> FrozenTarget:
    return FrozenTarget.of(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN), draft_ids)


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


def make_record(tokens: int, prompt_len: int, seed: int, domain: str = "chat", start: int = 0) -> CaptureRecord:
    rng = np.random.default_rng(seed)
    return CaptureRecord(
        request_id=str(seed),
        domain=domain,
        start=start,
        prompt_len=prompt_len,
        token_ids=rng.integers(0, VOCAB, tokens).astype(np.int32),
        fused=rng.standard_normal((tokens, 3 * HIDDEN)).astype(np.float32),
        last_hidden=rng.standard_normal((tokens, HIDDEN)).astype(np.float32),
    )
