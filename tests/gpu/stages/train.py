"""Stage train: one optimiser step of each drafter at its target's real shape, random weights and states.

    EAGLE-3    Llama-3.1-8B, draft vocabulary 32,000, seven unrolled steps
    DFlash     Qwen3-8B, five layers, blocks of 16, 512 anchors a sequence

Tokens a second are the sequence's own; the share is of the matrix peak measured just before, from the operations that
torch counts in the step (attention and products, forward and backward, recomputation included).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from draftloop.core.records import CaptureRecord
from draftloop.drafters.batch import Batch, collate
from draftloop.drafters.dflash import DflashConfig, DflashDrafter
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftloop.drafters.eagle3_loss import TttSettings
from draftloop.drafters.known_models import KNOWN_MODELS
from draftloop.drafters.online import OnlineSettings, OnlineTrainer
from draftloop.drafters.target import FrozenTarget
from stages.clock import Setting, matrix_peak, seconds
from stages.result import Row

TTT_STEPS = 7
PROMPT_PART = 3
DRY_SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 16, "vocab_size": 512}  # fmt: skip


def measure(setting: Setting) -> list[Row]:
    peak = matrix_peak(setting)
    rows = [Row("train", "", "matrix peak", peak / 1e12, "TFLOP/s", 1.0, "measured: the peak below")]
    for kind, model in (("eagle3", "Llama-3.1-8B-Instruct"), ("dflash", "Qwen3-8B")):
        for length in (64,) if setting.dry else (2048, 8192):
            rows += _step(kind, model, length, setting, peak)
    return rows


def _step(kind: str, model: str, length: int, setting: Setting, peak: float) -> list[Row]:
    case = f"{kind} for {model} T{length}"
    if setting.late:
        return [Row("train", case, "left out", None, "", note="out of time: --minutes")]
    target: dict[str, Any] = {**KNOWN_MODELS[model], **(DRY_SHAPE if setting.dry else {})}
    torch.manual_seed(0)
    drafter, frozen = _drafter(kind, target, setting)
    settings = OnlineSettings(ttt=TttSettings(steps=TTT_STEPS), learning_rate=1e-5)
    trainer = OnlineTrainer(drafter, frozen, settings, seed=0)
    batch = _batch(drafter, length, setting)
    with FlopCounterMode(display=False) as counter:
        report = trainer.step(batch)
    cuda = setting.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    spent = seconds(lambda: trainer.step(batch), setting)
    memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most, " if cuda else ""
    note = f"{memory}{spent * 1e3:.0f} ms a step, {report.positions} rows teach, loss {report.loss:.2f}"
    share = counter.get_total_flops() / spent / peak
    return [Row("train", case, "step", length / spent, "tokens/s", share, note)]


def _drafter(kind: str, target: dict[str, Any], setting: Setting) -> tuple[Drafter, FrozenTarget]:
    """Random weights, made on the device. The draft vocabulary is the first ids."""
    hidden, vocab = int(target["hidden_size"]), int(target["vocab_size"])
    draft_vocab = min(32000, vocab // 2)
    with torch.device(setting.device):
        embedding, head = torch.randn(vocab, hidden) * 0.02, torch.randn(vocab, hidden) * 0.02
        if kind == "eagle3":
            drafter: Drafter = Eagle3Drafter(Eagle3Config.for_target(target, draft_vocab))
            return drafter, FrozenTarget.of(embedding, head, torch.arange(draft_vocab))
        return DflashDrafter(DflashConfig.for_target(target, mask_token_id=5)), FrozenTarget.of(embedding, head, None)


def _batch(drafter: Drafter, length: int, setting: Setting) -> Batch:
    """One sequence of random tokens and states, its first third a prompt."""
    hidden, width = drafter.shape.hidden_size, len(drafter.shape.layer_ids) * drafter.shape.hidden_size
    record = CaptureRecord(
        request_id="random",
        domain="random",
        start=0,
        prompt_len=length // PROMPT_PART,
        token_ids=torch.randint(0, drafter.shape.vocab_size, (length,), dtype=torch.int32).numpy(),
        fused=torch.randn(length, width).numpy(),
        last_hidden=torch.randn(length, hidden).numpy(),
    )
    return collate([record], length, setting.device)
