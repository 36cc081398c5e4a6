"""A random Llama of five small layers with a tokenizer and a chat template, and what transformers says about it.

Usual initial weights would give logits so alike that greedy decoding hangs on rounding. Here embedding and head have
a standard deviation of 1 and 0.6, so that the best logit leads by about one on average, and the layers' matrices are
scaled (GAIN) so that greedy answers wander over some forty tokens in sixty, yet depend on the last tokens enough for
a drafter to learn them: a day-0 drafter is accepted 1.1 tokens a step, one trained for 4 s on 40 answers 1.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftloop.core.records import CaptureRecord

VOCAB = 512
HIDDEN = 64
LAYERS = 5
GAIN = 0.5
# What draftloop.drafters chooses for five layers.
LAYER_IDS = (0, 1, 3)
END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class States:
    """One plain forward over T tokens. fused: [T, K*H], outputs of LAYER_IDS.  last_hidden: [T, H], after the final
    norm.  logits: [T, V]."""

    fused: torch.Tensor
    last_hidden: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class TinyTarget:
    """folder: the checkpoint."""

    folder: Path

    @cached_property
    def model(self) -> LlamaForCausalLM:
        model = LlamaForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        return model

    @torch.no_grad()
    def states(self, token_ids: Sequence[int]) -> States:
        out = self.model(torch.tensor([list(token_ids)]), output_hidden_states=True)
        # hidden_states[i + 1] is the output of layer i; the last one has gone through the final norm.
        fused = torch.cat([out.hidden_states[layer + 1][0] for layer in LAYER_IDS], dim=-1)
        return States(fused, out.hidden_states[-1][0], out.logits[0])

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Plain greedy decoding by transformers, the end token ignored."""
        out = self.model.generate(torch.tensor([list(prompt)]), max_new_tokens=tokens, do_sample=False)
        return [int(token) for token in out[0, len(prompt) :]]

    def record(self, prompt: Sequence[int], tokens: int, domain: str = "chat", number: int = 0) -> CaptureRecord:
        """What the tap would capture of a request: all its rows but the last token's."""
        whole = [*prompt, *self.greedy(prompt, tokens)][:-1]
        states = self.states(whole)
        return CaptureRecord(
            request_id=f"{domain}--{number}",
            domain=domain,
            start=0,
            prompt_len=len(prompt),
            token_ids=np.array(whole, dtype=np.int32),
            fused=states.fused.numpy(),
            last_hidden=states.last_hidden.numpy(),
        )


def random_prompts(count: int, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Token ids without special ones; the lengths take turns."""
    rng = np.random.default_rng(seed)
    return [rng.integers(16, VOCAB, lengths[i % len(lengths)]).tolist() for i in range(count)]


def make_tiny_target(folder: Path, seed: int, gain: float = GAIN) -> TinyTarget:
    """Write the checkpoint; the same files for the same seed."""
    return _write(folder, seed, gain, _tokenizer())


def make_few_words_target(folder: Path, seed: int, words: int) -> TinyTarget:
    """The same model over a vocabulary of `words` tokens, so that its answers can be enumerated."""
    vocabulary = {END: 0, "<|unknown|>": 1, **{f"w{index}": index for index in range(2, words)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, unk_token="<|unknown|>")
    fast.chat_template = CHAT_TEMPLATE
    return _write(folder, seed, GAIN, fast)


def _write(folder: Path, seed: int, gain: float, tokenizer: PreTrainedTokenizerFast) -> TinyTarget:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=None,
    )
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.7, 1.3, generator=generator)
            else:
                weight.normal_(0.0, _std(name, weight.shape[1], gain), generator=generator)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return TinyTarget(folder)


def _std(name: str, fan_in: int, gain: float) -> float:
    if "embed_tokens" in name:
        return 1.0
    return 0.6 if "lm_head" in name else gain / fan_in**0.5


def _tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over made-up words, with exactly VOCAB entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    syllables = [first + second for first in "bdfgklmnprst" for second in ("a", "e", "i", "o", "u", "an", "er", "ol")]
    words = [a + b for a in syllables for b in syllables[::7]]
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=VOCAB,
        special_tokens=["<|start|>", END, "<|unused|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} entries, not {VOCAB}")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.chat_template = CHAT_TEMPLATE
    return fast
