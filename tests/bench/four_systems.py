"""Four systems, one table: EAGLE-1, EAGLE-2, EAGLE-3 and DFlash with the papers' ablations, on one target.

    python tests/bench/four_systems.py --work four_systems            about 40 minutes on one core
    python tests/bench/four_systems.py --quick --work quick           minutes; shows that it runs

Every drafter is trained on the same answers of the target, as many passes over them, and decodes the same held-out
prompts in the reference decoder: accepted length, acceptance per position (conditioned on the earlier ones), tokens
a second of processor time (which a busy machine disturbs less than the clock on the wall). Then acceptance against
the amount of training data, what each objective brings at equal training tokens (`four_objectives.py`), and draft
confidence against acceptance.

A stage is one drafter; its results go to `WORK/results.json`, and a run that was cut goes on where it stopped.
Figures go to `WORK/*.png` (`four_figures.py` makes them, and the tables, from results.json). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from four_figures import draw_figures
from four_objectives import objective_stages
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftloop.core.records import CaptureRecord
from draftloop.drafters.batch import collate
from draftloop.drafters.dflash import DflashConfig, DflashDrafter
from draftloop.drafters.dflash_loss import DflashSettings
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.eagle1 import Eagle1Config, Eagle1Drafter
from draftloop.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftloop.drafters.eagle3_loss import TttSettings, unroll_from
from draftloop.drafters.metrics import GateScore, Holdout, expected_accepted_length, prepare_holdout
from draftloop.drafters.online import OnlineSettings, OnlineTrainer
from draftloop.drafters.proposers import DflashProposer, DrawTree, EagleProposer, Proposer, dynamic
from draftloop.drafters.recurrent import RecurrentDrafter
from draftloop.drafters.reference_decoder import CachedTarget, Decoded, decode, decode_plainly
from draftloop.drafters.target import FrozenTarget, TargetWeights, load_target_weights, read_target_config
from draftloop.drafters.tree import EAGLE1_TREE, DraftTree, Propose, grow, rerank, static_tree, without_rerank
from draftloop.drafters.verify import RandomChance
from draftloop.drafters.vocab import build_draft_vocab, count_tokens
from draftloop.generator.prompts import Prompt, builtin_prompts, split
from draftloop.sglang.target import resolve_target

DEPTH, TOPK, TOTAL = 5, 4, 16
# SmolLM2 never says this special token, so its embedding is free to mean "unknown".
MASK_TOKEN = 5
# Outputs kept of every answer: EAGLE-3's three, DFlash's five, and those of the two-layer DFlash.
KEPT_LAYERS = (1, 8, 14, 20, 26, 27)


@dataclass(frozen=True)
class Answer:
    """A conversation. layers: [len(KEPT_LAYERS), T, H].  last_hidden: [T, H]."""

    domain: str
    tokens: list[int]
    prompt_len: int
    layers: torch.Tensor
    last_hidden: torch.Tensor

    def record(self, layer_ids: Sequence[int]) -> CaptureRecord:
        kept = [self.layers[KEPT_LAYERS.index(i)] for i in layer_ids]
        fused = torch.cat(kept, dim=-1) if kept else self.last_hidden[:, :0]
        return CaptureRecord(
            request_id="", domain=self.domain, start=0, prompt_len=self.prompt_len,
            token_ids=np.array(self.tokens, dtype=np.int32), fused=fused.numpy(), last_hidden=self.last_hidden.numpy(),
        )  # fmt: skip


class Bench:
    """The target, the answers it gave, and how drafters are built, trained and scored on them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        folder = resolve_target(args.target)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.config = read_target_config(folder)
        self.weights: TargetWeights = load_target_weights(folder)
        ends = self.model.generation_config.eos_token_id
        self.ends = [ends] if isinstance(ends, int) else list(ends or [])
        traffic, heldout = split(builtin_prompts(), args.heldout, args.seed)
        # The built-in prompts come domain by domain; a part of them must still be a mixture.
        random.Random(args.seed).shuffle(traffic)
        said = self._answers([*traffic[: args.train_prompts], *heldout])
        self.train, self.test = said[: args.train_prompts], said[args.train_prompts :]
        counts = count_tokens((a.tokens for a in self.train), int(self.config["vocab_size"]))
        self.draft_ids = build_draft_vocab(counts, args.draft_vocab, self.ends)
        embedding, head = self.weights.embedding, self.weights.lm_head
        self.small = FrozenTarget.of(embedding, head, self.draft_ids)
        self.whole = FrozenTarget.of(embedding, head, None)

    def _answers(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """The target's greedy answers; their tokens are kept in `WORK/answers.json`."""
        path = self.args.work / "answers.json"
        if not path.exists():
            rows = [row for i in range(0, len(prompts), 16) for row in self._generate(prompts[i : i + 16])]
            path.write_text(json.dumps(rows))
        return [self._with_states(**row) for row in json.loads(path.read_text())]

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        texts = [
            self.tokenizer.apply_chat_template(list(p.messages), add_generation_prompt=True, tokenize=False)
            for p in prompts
        ]
        feed = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        out = self.model.generate(**feed, max_new_tokens=self.args.answer, do_sample=False)
        rows = []
        for prompt, tokens, mask in zip(prompts, out.tolist(), feed["attention_mask"], strict=True):
            width, size = mask.numel(), int(mask.sum())
            answer = tokens[width:]
            ends = [i + 1 for i, token in enumerate(answer) if token in self.ends]
            whole = tokens[width - size : width] + answer[: min([len(answer), *ends])]
            rows.append({"domain": prompt.domain, "tokens": whole, "prompt_len": size})
        return rows

    @torch.no_grad()
    def _with_states(self, domain: str, tokens: list[int], prompt_len: int) -> Answer:
        states = self.model.model(torch.tensor([tokens]), output_hidden_states=True)
        # hidden_states[0] is the embedding.
        layers = torch.cat([states.hidden_states[i + 1] for i in KEPT_LAYERS])
        return Answer(domain, tokens, prompt_len, layers, states.last_hidden_state[0])

    def target_of(self, drafter: Drafter) -> FrozenTarget:
        return self.small if isinstance(drafter, Eagle3Drafter) else self.whole

    def steps_of(self, answers: Sequence[Any]) -> int:
        return max(1, int(self.args.epochs) * len(answers) // int(self.args.batch))

    def settings(self, answers: Sequence[Any], ttt_steps: int = DEPTH, block: int = 16) -> OnlineSettings:
        steps = self.steps_of(answers)
        gamma = {16: 7.0, 10: 5.0}.get(block, 4.0)
        # Equal slots a sequence, whatever the block.
        anchors = self.args.slots // block
        return OnlineSettings(
            ttt=TttSettings(steps=ttt_steps), block=DflashSettings(anchors=anchors, gamma=gamma),
            learning_rate=self.args.rate, cosine_steps=steps, warmup_steps=max(1, steps // 20),
        )  # fmt: skip

    def fit(self, drafter: Drafter, settings: OnlineSettings, records: Sequence[CaptureRecord]) -> OnlineTrainer:
        """Passes over the records, each in an order of its own; the drafter then holds the averaged weights."""
        trainer = OnlineTrainer(drafter, self.target_of(drafter), settings, self.args.seed)
        for _ in range(self.args.epochs):
            order = torch.randperm(len(records), generator=trainer.generator).tolist()
            for begin in range(0, len(order), self.args.batch):
                picked = [records[i] for i in order[begin : begin + self.args.batch]]
                trainer.step(collate(picked, 1024, "cpu", trainer.generator))
        drafter.load_state_dict(trainer.candidate_state_dict())
        drafter.eval()
        return trainer

    def trained(self, drafter: Drafter, settings: OnlineSettings, answers: Sequence[Answer]) -> Drafter:
        self.fit(drafter, settings, [answer.record(drafter.shape.layer_ids) for answer in answers])
        return drafter

    def eagle1(self, answers: Sequence[Answer], shifted: bool = True) -> Drafter:
        config = Eagle1Config.for_target(self.config)
        config = config if shifted else config.without_shifted_token()
        head = Eagle1Drafter.untrained(config, self.args.seed)
        return self.trained(head, self.settings(answers), answers)

    def new_eagle3(self, layer_ids: tuple[int, ...] | None = None) -> Eagle3Drafter:
        config = Eagle3Config.for_target(self.config, len(self.draft_ids), layer_ids)
        w = self.weights
        return Eagle3Drafter.untrained(config, self.draft_ids, w.lm_head, w.norm, self.args.seed, w.last_layer)

    def eagle3(
        self, answers: Sequence[Answer], ttt_steps: int = DEPTH, layer_ids: tuple[int, ...] | None = None
    ) -> Drafter:
        return self.trained(self.new_eagle3(layer_ids), self.settings(answers, ttt_steps), answers)

    def dflash(self, answers: Sequence[Answer], layers: int = 5, block: int = 16) -> Drafter:
        config = DflashConfig.for_target(self.config, MASK_TOKEN, layers, block)
        drafter = DflashDrafter.untrained(config, self.weights.norm, self.args.seed)
        return self.trained(drafter, self.settings(answers, block=block), answers)

    def proposer(self, drafter: Drafter, draw: DrawTree) -> Proposer:
        if isinstance(drafter, DflashDrafter):
            return DflashProposer(drafter, self.whole)
        assert isinstance(drafter, RecurrentDrafter)
        return EagleProposer(drafter, self.target_of(drafter), draw)

    def holdout(self, drafter: Drafter, answers: Sequence[Answer] | None = None) -> Holdout:
        records = [answer.record(drafter.shape.layer_ids) for answer in answers or self.test]
        return prepare_holdout(records, self.target_of(drafter), 1024, "cpu")

    def chain(self, drafter: Drafter, answers: Sequence[Answer] | None = None) -> dict[str, Any]:
        """A chain of DEPTH drafts from every position of the held-out answers: expected accepted length, and the share
        accepted of each draft whose earlier ones were."""
        score = expected_accepted_length(drafter, self.holdout(drafter, answers), self.target_of(drafter), (1,) * DEPTH)
        return {"accept_length": round(score.accept_length, 3), "positions": conditioned(score)}


def conditioned(score: GateScore) -> list[float | None]:
    reached = [1.0, *score.survival]
    return [round(b / a, 3) if a else None for a, b in pairwise(reached)]


def by_confidence(propose: Propose, root: int) -> DraftTree:
    return rerank(grow(propose, DEPTH, TOPK, by="confidence"), root, TOTAL)


def no_rerank(propose: Propose, root: int) -> DraftTree:
    return without_rerank(grow(propose, DEPTH, TOPK), root, TOTAL)


@dataclass(frozen=True)
class Stage:
    """One drafter. rows: the trees it decodes with, by the name of the table's row; none for an ablated drafter, whose
    chain says enough.  sampled: rows that are decoded at T=1 too."""

    name: str
    build: Callable[[], Drafter]
    rows: dict[str, DrawTree] = field(default_factory=dict)
    sampled: tuple[str, ...] = ()
    calibrate: bool = False


def table_stages(bench: Bench) -> list[Stage]:
    answers, tree = bench.train, dynamic(DEPTH, TOPK, TOTAL)
    static = partial(static_tree, paths=EAGLE1_TREE[: TOTAL - 1])
    high = (26, 26, 26)
    return [
        Stage("EAGLE-1", lambda: bench.eagle1(answers), {
            "EAGLE-1": static, "EAGLE-2": tree, "EAGLE-2, expanded by confidence": by_confidence,
            "EAGLE-2, without rerank": no_rerank,
        }, ("EAGLE-1", "EAGLE-2")),
        Stage("EAGLE-3", lambda: bench.eagle3(answers), {
            "EAGLE-3": tree, "EAGLE-3, chain": dynamic(DEPTH, 1, DEPTH + 1),
        }, ("EAGLE-3",), calibrate=True),
        Stage("DFlash", lambda: bench.dflash(answers), {"DFlash": tree}, ("DFlash",)),
        Stage("EAGLE-3, without training-time test", lambda: bench.eagle3(answers, 1)),
        Stage("EAGLE-3, without fused features", lambda: bench.eagle3(answers, DEPTH, high)),
        Stage("EAGLE-1, without shifted token", lambda: bench.eagle1(answers, False)),
        Stage("DFlash, block 8", lambda: bench.dflash(answers, block=8)),
        Stage("DFlash, 2 layers", lambda: bench.dflash(answers, layers=2)),
    ]  # fmt: skip


def run_stage(bench: Bench, stage: Stage) -> dict[str, Any]:
    begin = time.process_time()
    drafter = stage.build()
    result: dict[str, Any] = {"train_seconds": time.process_time() - begin, "chain": bench.chain(drafter), "rows": {}}
    for row, draw in stage.rows.items():
        result["rows"][row] = {"greedy": decode_all(bench, drafter, draw, 0.0)}
        if row in stage.sampled:
            result["rows"][row]["sampled"] = decode_all(bench, drafter, draw, 1.0)
    if stage.calibrate:
        result["calibration"] = calibration(bench, drafter)
    return result


def decode_all(bench: Bench, drafter: Drafter, draw: DrawTree, temperature: float) -> dict[str, Any]:
    results, begin = [], time.process_time()
    for number, answer in enumerate(bench.test):
        chance = RandomChance(torch.Generator().manual_seed(number)) if temperature else None
        target = CachedTarget(bench.model, drafter.shape.layer_ids)
        prompt, proposer = answer.tokens[: answer.prompt_len], bench.proposer(drafter, draw)
        results.append(decode(target, proposer, prompt, bench.args.new, bench.ends, chance, temperature or 1.0))
    seconds = (time.process_time() - begin) / bench.args.threads
    return summary(results, seconds)


def summary(results: Sequence[Decoded], seconds: float) -> dict[str, Any]:
    turns = sum(len(r.accepted) for r in results)
    positions = []
    for depth in range(1, DEPTH + 1):
        pairs = [r.acceptance(depth) for r in results]
        hit, tried = (sum(x) for x in zip(*pairs, strict=True))
        positions.append(round(hit / tried, 3) if tried else None)
    return {
        "accept_length": round(1.0 + sum(sum(r.accepted) for r in results) / max(turns, 1), 3),
        "positions": positions,
        "tokens_per_s": round(sum(len(r.tokens) for r in results) / seconds, 2),
    }


def plain_speed(bench: Bench) -> dict[str, float]:
    begin, tokens = time.process_time(), 0
    for answer in bench.test:
        prompt = answer.tokens[: answer.prompt_len]
        tokens += len(decode_plainly(CachedTarget(bench.model, ()), prompt, bench.args.new, bench.ends))
    seconds = (time.process_time() - begin) / bench.args.threads
    said = sum(len(answer.tokens) - answer.prompt_len for answer in bench.train)
    return {"tokens_per_s": round(tokens / seconds, 2), "train_tokens": said}


def growth(bench: Bench, kind: str, part: int) -> dict[str, Any]:
    """Held-out accepted length of a chain after as many passes over a part of the answers."""
    answers = bench.train[: max(1, len(bench.train) // part)]
    makers: dict[str, Callable[[Sequence[Answer]], Drafter]] = {
        "eagle3": bench.eagle3,
        "no-ttt": partial(bench.eagle3, ttt_steps=1),
        "eagle1": bench.eagle1,
    }
    drafter = makers[kind](answers)
    return {"tokens": sum(len(a.tokens) - a.prompt_len for a in answers), "chain": bench.chain(drafter)}


@torch.no_grad()
def calibration(bench: Bench, drafter: Drafter, bins: int = 10) -> list[tuple[float, float, int]]:
    """(mean confidence, share accepted, drafts) of the four best first drafts of each held-out position."""
    confidence, accepted = [], []
    target = bench.target_of(drafter)
    for batch, _, greedy in bench.holdout(drafter).batches:
        unrolled = unroll_from(batch.generated, batch.ends, 1)
        (feature,) = drafter.guess(batch, target, unrolled.positions, 1)
        taught = unrolled.taught[0]
        best = drafter.guess_logits(feature[taught], target).softmax(-1).topk(4, dim=-1)
        wanted = torch.gather(greedy, 1, unrolled.row[0])[taught]
        confidence.append(best.values.flatten())
        accepted.append((drafter.draft_ids()[best.indices] == wanted[:, None]).flatten())
    values, hits = torch.cat(confidence), torch.cat(accepted).float()
    place = (values * bins).long().clamp(max=bins - 1)
    chosen = [place == b for b in range(bins)]
    return [(float(values[c].mean()), float(hits[c].mean()), int(c.sum())) for c in chosen if bool(c.any())]


class Results:
    """What the stages found, in one JSON file that is written after each of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def stage(self, name: str, run: Callable[[], Any]) -> None:
        if name not in self.found:
            begin = time.perf_counter()
            self.found[name] = run()
            self._path.write_text(json.dumps(self.found, indent=1))
            print(f"{name} ({time.perf_counter() - begin:.0f} s) {json.dumps(self.found[name])}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--train-prompts", type=int, default=128)
    parser.add_argument("--answer", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--slots", type=int, default=128, help="DFlash: slots denoised a sequence")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--draft-vocab", type=int, default=4096)
    parser.add_argument("--heldout", type=int, default=10)
    parser.add_argument("--new", type=int, default=24, help="tokens decoded of each held-out prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("four_systems"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    args = parser.parse_args()
    if args.quick:
        args.train_prompts, args.answer, args.heldout, args.new, args.epochs = 8, 24, 2, 12, 1
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    results = Results(args.work / "results.json")
    results.stage("plain", lambda: plain_speed(bench))
    for stage in table_stages(bench):
        results.stage(stage.name, partial(run_stage, bench, stage))
    for kind in ("eagle3", "no-ttt", "eagle1"):
        for part in (16, 4):
            results.stage(f"{kind} on 1/{part}", partial(growth, bench, kind, part))
    for name, run in objective_stages(bench).items():
        results.stage(name, run)
    draw_figures(results.found, args.work)
    print(json.dumps(results.found))


if __name__ == "__main__":
    main()
