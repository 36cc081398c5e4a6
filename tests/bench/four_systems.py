"""Four systems, one table: EAGLE-1, EAGLE-2, EAGLE-3 and DFlash with the papers' ablations, on one target.

    python tests/bench/four_systems.py                                   small, minutes; shows that it runs
    python tests/bench/four_systems.py --train-prompts 600 --answer 200 --steps 1500 --heldout 40 --new 128

Every drafter is trained on the same regenerated answers, with the same number of optimiser steps, and decodes the
same held-out prompts in the reference decoder, greedily and at T=1: accepted length, acceptance per position
(conditioned on the earlier ones), tokens a second. Then acceptance against the amount of training data, and draft
confidence against acceptance. Figures are PNG files in `--out`; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftloop.core.records import CaptureRecord
from draftloop.drafters.batch import collate
from draftloop.drafters.dflash import DflashConfig, DflashDrafter
from draftloop.drafters.dflash_loss import DflashSettings
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.eagle1 import Eagle1Config, Eagle1Drafter
from draftloop.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftloop.drafters.eagle3_loss import TttSettings, unroll_from
from draftloop.drafters.metrics import Holdout, expected_accepted_length, prepare_holdout
from draftloop.drafters.online import OnlineSettings, OnlineTrainer
from draftloop.drafters.proposers import DflashProposer, DrawTree, EagleProposer, Proposer, dynamic
from draftloop.drafters.recurrent import RecurrentDrafter
from draftloop.drafters.reference_decoder import CachedTarget, Decoded, decode, decode_plainly
from draftloop.drafters.target import FrozenTarget, TargetWeights, load_target_weights, read_target_config
from draftloop.drafters.tree import EAGLE1_TREE, DraftTree, Propose, grow, rerank, static_tree, without_rerank
from draftloop.drafters.verify import RandomChance
from draftloop.drafters.vocab import build_draft_vocab, count_tokens
from draftloop.generator.prompts import builtin_prompts, split
from draftloop.sglang.target import resolve_target

matplotlib.use("Agg")
DEPTH, TOPK, TOTAL = 5, 4, 16
# SmolLM2 never says this special token, so its embedding is free to mean "unknown".
MASK_TOKEN = 5


@dataclass(frozen=True)
class Answer:
    """One conversation: its tokens, the prompt's length, every layer's output [L, T, H] and the final state [T, H]."""

    tokens: list[int]
    prompt_len: int
    layers: torch.Tensor
    last_hidden: torch.Tensor

    def record(self, layer_ids: Sequence[int]) -> CaptureRecord:
        fused = torch.cat([self.layers[i] for i in layer_ids], dim=-1) if layer_ids else self.last_hidden[:, :0]
        return CaptureRecord(
            request_id="", domain="bench", start=0, prompt_len=self.prompt_len,
            token_ids=np.array(self.tokens, dtype=np.int32), fused=fused.numpy(), last_hidden=self.last_hidden.numpy(),
        )  # fmt: skip


class Bench:
    """The target, the answers it gave, and the drafters trained on them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        folder = resolve_target(args.target)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.config = read_target_config(folder)
        self.weights: TargetWeights = load_target_weights(folder)
        ends = self.model.generation_config.eos_token_id
        self.ends = [ends] if isinstance(ends, int) else list(ends or [])
        traffic, heldout = split(builtin_prompts(), args.heldout, args.seed)

        def tokens_of(messages: Any) -> list[int]:
            ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
            return list(ids["input_ids"])

        self.prompts = [tokens_of(prompt.messages) for prompt in heldout]
        self.train = [self.answer(tokens_of(prompt.messages)) for prompt in traffic[: args.train_prompts]]
        self.test = [self.answer(prompt) for prompt in self.prompts]
        counts = count_tokens((a.tokens for a in self.train), int(self.config["vocab_size"]))
        self.draft_ids = build_draft_vocab(counts, args.draft_vocab, self.ends)
        embedding, head = self.weights.embedding, self.weights.lm_head
        self.small = FrozenTarget.of(embedding, head, self.draft_ids)
        self.whole = FrozenTarget.of(embedding, head, None)

    @torch.no_grad()
    def answer(self, prompt: list[int]) -> Answer:
        tokens = prompt + list(decode_plainly(CachedTarget(self.model, ()), prompt, self.args.answer, self.ends))
        states = self.model.model(torch.tensor([tokens]), output_hidden_states=True)
        layers = torch.cat(states.hidden_states[1:-1])
        return Answer(tokens, len(prompt), layers, states.last_hidden_state[0])

    def target_of(self, drafter: Drafter) -> FrozenTarget:
        return self.small if isinstance(drafter, Eagle3Drafter) else self.whole

    def fit(self, drafter: Drafter, settings: OnlineSettings, answers: Sequence[Answer]) -> Drafter:
        trainer = OnlineTrainer(drafter, self.target_of(drafter), settings, self.args.seed)
        records = [answer.record(drafter.shape.layer_ids) for answer in answers]
        for _ in range(self.args.steps):
            pick = torch.randint(len(records), (self.args.batch,), generator=trainer.generator).tolist()
            trainer.step(collate([records[i] for i in pick], 1024, "cpu", trainer.generator))
        drafter.load_state_dict(trainer.candidate_state_dict())
        return drafter.eval()

    def settings(self, ttt_steps: int = DEPTH, block: int = 16) -> OnlineSettings:
        gamma = {16: 7.0, 10: 5.0}.get(block, 4.0)
        return OnlineSettings(
            ttt=TttSettings(steps=ttt_steps), block=DflashSettings(anchors=self.args.anchors, gamma=gamma),
            learning_rate=self.args.rate, cosine_steps=self.args.steps, warmup_steps=max(1, self.args.steps // 20),
        )  # fmt: skip

    def eagle1(self, answers: Sequence[Answer], shifted: bool = True) -> Drafter:
        config = Eagle1Config.for_target(self.config)
        config = config if shifted else config.without_shifted_token()
        head = Eagle1Drafter.untrained(config, self.args.seed, self.weights.last_layer)
        return self.fit(head, self.settings(), answers)

    def eagle3(
        self, answers: Sequence[Answer], ttt_steps: int = DEPTH, layer_ids: tuple[int, ...] | None = None
    ) -> Drafter:
        config = Eagle3Config.for_target(self.config, len(self.draft_ids), layer_ids)
        w = self.weights
        drafter = Eagle3Drafter.untrained(config, self.draft_ids, w.lm_head, w.norm, self.args.seed, w.last_layer)
        return self.fit(drafter, self.settings(ttt_steps), answers)

    def dflash(self, answers: Sequence[Answer], layers: int = 5, block: int = 16) -> Drafter:
        config = DflashConfig.for_target(self.config, MASK_TOKEN, layers, block)
        drafter = DflashDrafter.untrained(config, self.weights.norm, self.args.seed)
        return self.fit(drafter, self.settings(block=block), answers)

    def propose(self, drafter: Drafter, draw: DrawTree) -> Proposer:
        if isinstance(drafter, DflashDrafter):
            return DflashProposer(drafter, self.whole)
        assert isinstance(drafter, RecurrentDrafter)
        return EagleProposer(drafter, self.target_of(drafter), draw)

    def decode_all(self, drafter: Drafter, draw: DrawTree, temperature: float) -> list[Decoded]:
        results = []
        for number, prompt in enumerate(self.prompts):
            chance = RandomChance(torch.Generator().manual_seed(number)) if temperature else None
            target = CachedTarget(self.model, drafter.shape.layer_ids)
            proposer = self.propose(drafter, draw)
            results.append(decode(target, proposer, prompt, self.args.new, self.ends, chance, temperature or 1.0))
        return results

    def holdout(self, drafter: Drafter) -> Holdout:
        records = [answer.record(drafter.shape.layer_ids) for answer in self.test]
        return prepare_holdout(records, self.target_of(drafter), 1024, "cpu")


def by_confidence(propose: Propose, root: int) -> DraftTree:
    return rerank(grow(propose, DEPTH, TOPK, by="confidence"), root, TOTAL)


def no_rerank(propose: Propose, root: int) -> DraftTree:
    return without_rerank(grow(propose, DEPTH, TOPK), root, TOTAL)


def systems(bench: Bench) -> list[tuple[str, Drafter, DrawTree]]:
    """Every row of the table. Drafters that differ only by their tree are trained once."""
    answers, tree = bench.train, dynamic(DEPTH, TOPK, TOTAL)
    eagle1, eagle3 = bench.eagle1(answers), bench.eagle3(answers)
    high = eagle3.shape.layer_ids[-1]
    static = partial(static_tree, paths=EAGLE1_TREE)
    return [
        ("EAGLE-1", eagle1, static),
        ("EAGLE-1, no shifted token", bench.eagle1(answers, shifted=False), static),
        ("EAGLE-2", eagle1, tree),
        ("EAGLE-2, by confidence", eagle1, by_confidence),
        ("EAGLE-2, no rerank", eagle1, no_rerank),
        ("EAGLE-3", eagle3, tree),
        ("EAGLE-3, chain", eagle3, dynamic(DEPTH, 1, DEPTH + 1)),
        ("EAGLE-3, no training-time test", bench.eagle3(answers, ttt_steps=1), tree),
        ("EAGLE-3, high layer only", bench.eagle3(answers, layer_ids=(high, high, high)), tree),
        ("DFlash", bench.dflash(answers), tree),
        ("DFlash, block 8", bench.dflash(answers, block=8), tree),
        ("DFlash, 2 layers", bench.dflash(answers, layers=2), tree),
    ]


def summary(results: Sequence[Decoded]) -> dict[str, Any]:
    turns = sum(len(r.accepted) for r in results)
    positions = []
    for depth in range(1, DEPTH + 1):
        pairs = [r.acceptance(depth) for r in results]
        hit, tried = (sum(x) for x in zip(*pairs, strict=True))
        positions.append(round(hit / tried, 3) if tried else None)
    return {
        "accept_length": 1.0 + sum(sum(r.accepted) for r in results) / max(turns, 1),
        "positions": positions,
        "tokens_per_s": sum(len(r.tokens) - 1 for r in results) / max(sum(r.seconds for r in results), 1e-9),
    }


def growth(bench: Bench) -> dict[str, list[tuple[int, float]]]:
    """Held-out expected accepted length of a chain against the training tokens, at equal steps."""
    kinds: dict[str, Callable[[Sequence[Answer]], Drafter]] = {
        "EAGLE-3": bench.eagle3,
        "no training-time test": partial(bench.eagle3, ttt_steps=1),
        "feature loss (EAGLE-1)": bench.eagle1,
    }
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in kinds}
    for part in (4, 2, 1):
        answers = bench.train[: max(1, len(bench.train) // part)]
        tokens = sum(len(answer.tokens) for answer in answers)
        for name, build in kinds.items():
            drafter = build(answers)
            score = expected_accepted_length(drafter, bench.holdout(drafter), bench.target_of(drafter), (1,) * DEPTH)
            curves[name].append((tokens, score.accept_length))
    return curves


@torch.no_grad()
def calibration(bench: Bench, drafter: Drafter, bins: int = 10) -> list[tuple[float, float, int]]:
    """(mean confidence, share accepted, drafts) of the four best first drafts of each held-out position."""
    confidence, accepted = [], []
    target = bench.target_of(drafter)
    for batch, _, greedy in bench.holdout(drafter).batches:
        unrolled = unroll_from(batch.generated, 1)
        (feature,) = drafter.guess(batch, target, unrolled.positions, 1)
        taught = unrolled.taught[0]
        best = drafter.guess_logits(feature[taught], target).softmax(-1).topk(4, dim=-1)
        wanted = torch.gather(greedy, 1, unrolled.row[0])[taught]
        confidence.append(best.values.flatten())
        accepted.append((drafter.draft_ids()[best.indices] == wanted[:, None]).flatten())
    values, hits = torch.cat(confidence), torch.cat(accepted).float()
    place = (values * bins).long().clamp(max=bins - 1)
    return [
        (float(values[place == b].mean()), float(hits[place == b].mean()), int((place == b).sum()))
        for b in range(bins)
        if bool((place == b).any())
    ]


def draw_figures(
    out: Path, table: dict[str, Any], curves: dict[str, list[tuple[int, float]]], points: list[tuple[float, float, int]]
) -> None:
    from matplotlib import pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name in ("EAGLE-1", "EAGLE-2", "EAGLE-3", "EAGLE-3, no training-time test", "DFlash"):
        values = table[name]["greedy"]["positions"]
        axes.plot(range(1, DEPTH + 1), [np.nan if v is None else v for v in values], marker="o", label=name)
    axes.set(xlabel="position of the draft", ylabel="accepted, given the earlier ones", ylim=(0, 1))
    axes.legend()
    figure.savefig(out / "positions.png", dpi=120)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), marker="o", label=name)
    axes.set(xlabel="training tokens", ylabel="expected accepted length (chain)")
    axes.legend()
    figure.savefig(out / "growth.png", dpi=120)
    figure, axes = plt.subplots(figsize=(4, 4), layout="constrained")
    axes.plot([0, 1], [0, 1], color="0.7")
    axes.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o")
    axes.set(xlabel="draft confidence", ylabel="accepted")
    figure.savefig(out / "calibration.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--train-prompts", type=int, default=4)
    parser.add_argument("--answer", type=int, default=32, help="tokens of a training answer")
    parser.add_argument("--steps", type=int, default=6, help="optimiser steps of each drafter")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--anchors", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--draft-vocab", type=int, default=4096)
    parser.add_argument("--heldout", type=int, default=2)
    parser.add_argument("--new", type=int, default=12, help="tokens decoded of each held-out prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("four_systems"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bench = Bench(args)
    begin = time.perf_counter()
    plain = sum(len(decode_plainly(CachedTarget(bench.model, ()), p, args.new, bench.ends)) for p in bench.prompts) / (
        time.perf_counter() - begin
    )
    print(f"plain decoding {plain:.1f} tokens/s; {sum(len(a.tokens) for a in bench.train)} training tokens", flush=True)
    table: dict[str, Any] = {}
    calibrated: Drafter | None = None
    for name, drafter, draw in systems(bench):
        table[name] = {
            "greedy": summary(bench.decode_all(drafter, draw, 0.0)),
            "sampled": summary(bench.decode_all(drafter, draw, 1.0)),
        }
        greedy, sampled = table[name]["greedy"], table[name]["sampled"]
        print(
            f"{name:32} greedy {greedy['accept_length']:.2f} {greedy['positions']} {greedy['tokens_per_s']:.1f}/s"
            f"   T=1 {sampled['accept_length']:.2f}",
            flush=True,
        )
        calibrated = drafter if name == "EAGLE-3" else calibrated
    assert calibrated is not None
    curves, points = growth(bench), calibration(bench, calibrated)
    draw_figures(args.out, table, curves, points)
    print(json.dumps({"plain_tokens_per_s": plain, "table": table, "growth": curves, "calibration": points}))


if __name__ == "__main__":
    main()
