"""Capture records without a server: SmolLM2's greedy answers to the built-in prompts, by transformers.

The states are those of a plain forward, which is what the tap captures (tests/serving proves it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftloop.core.records import CaptureRecord
from draftloop.drafters.eagle3 import default_layer_ids
from draftloop.generator.prompts import builtin_prompts
from draftloop.sglang.target import resolve_target

# Batches this wide cost a CPU little more than half as wide ones.
BATCH = 32


@torch.no_grad()
def answered_prompts(max_new_tokens: int, max_prompt: int) -> Iterator[CaptureRecord]:
    """A record for every built-in prompt of at most `max_prompt` tokens; request ids are `domain--prompt id`."""
    folder = str(resolve_target("smollm2"))
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layers = default_layer_ids(model.config.num_hidden_layers)
    rows: list[tuple[str, str, list[int]]] = []
    for prompt in builtin_prompts():
        ids = tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=False)
        rows.append((prompt.domain, prompt.id, list(ids)))
    # Like lengths together: little padding.
    rows = sorted((row for row in rows if len(row[2]) <= max_prompt), key=lambda row: len(row[2]))
    for begin in range(0, len(rows), BATCH):
        group = rows[begin : begin + BATCH]
        padded = tokenizer.pad({"input_ids": [ids for _, _, ids in group]}, return_tensors="pt")
        answers = model.generate(**padded, max_new_tokens=max_new_tokens, do_sample=False)
        for (domain, prompt_id, ids), answer in zip(group, answers[:, padded["input_ids"].shape[1] :], strict=True):
            whole = [*ids, *_until_end(answer.tolist(), model.config.eos_token_id)][:-1]
            yield _record(model, layers, f"{domain}--{prompt_id}", domain, len(ids), whole)


def _until_end(answer: Sequence[int], end: int) -> Sequence[int]:
    return answer[: answer.index(end) + 1] if end in answer else answer


def _record(
    model: Any, layers: Sequence[int], request_id: str, domain: str, prompt_len: int, whole: list[int]
) -> CaptureRecord:
    out = model.model(torch.tensor([whole]), output_hidden_states=True)
    # hidden_states[i + 1] is the output of layer i; the last one has gone through the final norm.
    fused = torch.cat([out.hidden_states[layer + 1][0] for layer in layers], dim=-1)
    return CaptureRecord(
        request_id=request_id,
        domain=domain,
        start=0,
        prompt_len=prompt_len,
        token_ids=np.array(whole, dtype=np.int32),
        fused=fused.numpy(),
        last_hidden=out.hidden_states[-1][0].numpy(),
    )
