"""One training step of EAGLE-3 (7 steps unrolled) and of DFlash (blocks of 16), beside the public trainers.

    python tests/bench/train_step.py             H 576 and 1024, T 512 and 2048: under 10 minutes on an idle core
    python tests/bench/train_step.py --quick     H 576, T 512

`speculators` and `specforge` come from PyPI without their dependencies into a throw-away folder (uv), and run with the
attention that a CPU has: SDPA. Each of the three is a process of its own, with the same shapes, dtype, optimiser,
threads and loss mask (the first `--prompt-share` of the rows is prompt). They take turns, one step each: a round.
The first round warms up. A step's time is processor time over threads, which a busy machine disturbs less than the
clock on the wall; a ratio is taken within a round, and the median over the rounds counts. Memory is what the steps
add to the resident set (on a GPU: the allocator's peak). The last line is JSON:

    eagle3_ratio, dflash_ratio    ours over the faster of the two, tokens/s, the worst of the shapes
    memory_ratio                  ours over the leaner of the two, the worst of the shapes
    eagle3_32k                    with --long: MiB of one step over 32768 tokens of H 576, and its seconds
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

VOCAB, LAYERS, BLOCK, TTT_STEPS, TARGET_LAYERS = 49152, 3, 16, 7, 30
RIVALS = {"speculators": ("speculators", "hs-connectors"), "specforge": ("specforge",)}


def shape_of(hidden: int) -> dict[str, Any]:
    """A Llama layer of this width, as a transformers config wants it."""
    heads = hidden // 64
    return {
        "hidden_size": hidden, "intermediate_size": hidden * 8 // 3, "num_attention_heads": heads,
        "num_key_value_heads": heads // 3 if heads % 3 == 0 else heads // 4, "head_dim": 64, "vocab_size": VOCAB,
        "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    }  # fmt: skip


# --- one measurement, in its own process -------------------------------------------------------------------------


def child(case: dict[str, Any]) -> None:
    """Build, then make one step for every line read, and say in a JSON line what it took."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import torch

    torch.set_num_threads(case["threads"])
    torch.manual_seed(0)
    step = BUILDERS[case["who"], case["what"]](case)
    reset_peak()
    before = resident_mib("VmRSS")
    say({"built": case["who"]})
    for _ in sys.stdin:
        begin = now()
        loss = step()
        seconds = (now() - begin) / case["threads"]
        on_gpu = torch.cuda.is_available()
        used = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else resident_mib("VmHWM") - before
        say({"mib": used, "loss": loss, "seconds": seconds})


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def now() -> float:
    """Seconds; see the module's text."""
    import torch

    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak() -> None:
    # Where this is not allowed the peak includes building the model, for all alike.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def resident_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def ours(case: dict[str, Any]) -> Callable[[], float]:
    import torch

    from draftloop.core.records import CaptureRecord
    from draftloop.drafters.batch import collate
    from draftloop.drafters.dflash import DflashConfig, DflashDrafter
    from draftloop.drafters.dflash_loss import DflashSettings
    from draftloop.drafters.drafter import Drafter
    from draftloop.drafters.eagle3 import Eagle3Config, Eagle3Drafter
    from draftloop.drafters.eagle3_loss import TttSettings
    from draftloop.drafters.online import OnlineSettings, OnlineTrainer
    from draftloop.drafters.target import FrozenTarget

    hidden, length = case["hidden"], case["length"]
    target = {**shape_of(hidden), "num_hidden_layers": TARGET_LAYERS}
    embedding, head = torch.randn(VOCAB, hidden) * 0.02, torch.randn(VOCAB, hidden) * 0.02
    drafter: Drafter
    if case["what"] == "eagle3":
        ids: torch.Tensor | None = torch.arange(case["draft_vocab"])
        drafter = Eagle3Drafter.untrained(Eagle3Config.for_target(target, case["draft_vocab"]), ids, head, None, seed=0)  # type: ignore[arg-type]
    else:
        ids = None
        drafter = DflashDrafter.untrained(DflashConfig.for_target(target, mask_token_id=5), None, seed=0)
    settings = OnlineSettings(ttt=TttSettings(steps=TTT_STEPS), block=DflashSettings(anchors=case["anchors"]))
    frozen = FrozenTarget.of(embedding, head, ids).to(device())
    trainer = OnlineTrainer(drafter.to(device()), frozen, settings, seed=0)
    width = len(drafter.shape.layer_ids) * hidden
    record = CaptureRecord(
        request_id="", domain="", start=0, prompt_len=1 + int((loss_mask(case) == 0).sum()),
        token_ids=torch.randint(0, VOCAB, (length,), dtype=torch.int32).numpy(),
        fused=torch.randn(length, width).numpy(), last_hidden=torch.randn(length, hidden).numpy(),
    )  # fmt: skip
    batch = collate([record], length, device())
    return lambda: trainer.step(batch).loss


def plain_step(model: Any, loss_of: Callable[[], Any]) -> Callable[[], float]:
    """Forward, backward, clip and AdamW, as a trainer would; frozen weights stay out of the optimiser."""
    import torch

    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step() -> float:
        with torch.autocast(device(), torch.bfloat16, enabled=device() == "cuda"):
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def speculators_eagle3(case: dict[str, Any]) -> Callable[[], float]:
    from speculators.losses import resolve_loss_config  # type: ignore[import-not-found]
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig  # type: ignore[import-not-found]
    from transformers import LlamaConfig

    layer = LlamaConfig(**shape_of(case["hidden"]), num_hidden_layers=1)
    layer._attn_implementation = "sdpa"
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=case["draft_vocab"],
            eagle_aux_hidden_state_layer_ids=[1, 14, 26],
        )
    )
    freeze(model, ("embed_tokens", "verifier"))
    model.to(device())
    inputs = random_inputs(case, LAYERS)
    return plain_step(
        model,
        lambda: model(
            inputs["fused"], inputs["ids"], inputs["documents"], loss_mask=inputs["mask"].bool(),
            verifier_last_hidden_states=inputs["last"], ttt_steps=TTT_STEPS, ttt_step_loss_decay=0.8,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )[1],
    )  # fmt: skip


def speculators_dflash(case: dict[str, Any]) -> Callable[[], float]:
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig  # type: ignore[import-not-found]
    from transformers import Qwen3Config

    layer = Qwen3Config(**shape_of(case["hidden"]), num_hidden_layers=5)
    layer._attn_implementation = "sdpa"
    model = DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=layer, draft_vocab_size=VOCAB, block_size=BLOCK,
            aux_hidden_state_layer_ids=[1, 8, 14, 20, 27], mask_token_id=5,
        )
    )  # fmt: skip
    freeze(model, ("embed_tokens", "verifier", "lm_head"))
    model.to(device())
    inputs = random_inputs(case, 5)
    return plain_step(
        model,
        lambda: model(
            inputs["fused"], inputs["ids"], inputs["mask"], inputs["last"], inputs["documents"],
            loss_config=resolve_loss_config("ce", "eager"), gamma=7.0, max_anchors=case["anchors"],
        )[1],
    )  # fmt: skip


def specforge_eagle3(case: dict[str, Any]) -> Callable[[], float]:
    import torch
    from specforge.algorithms.eagle3 import model as specforge_model  # type: ignore[import-not-found]
    from specforge.core import loss as specforge_loss  # type: ignore[import-not-found]
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3  # type: ignore[import-not-found]
    from transformers import LlamaConfig

    if device() == "cpu":  # its kernel is Triton; its own reference implementation stands in
        specforge_model.LogSoftmaxLoss = type("Loss", (), {"apply": staticmethod(specforge_loss._compute_loss)})
    config = LlamaConfig(**shape_of(case["hidden"]), num_hidden_layers=1, pad_token_id=0)
    config.draft_vocab_size = case["draft_vocab"]
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    draft.t2d.zero_()
    draft.t2d[: case["draft_vocab"]] = True
    freeze(draft, ("embed_tokens",))
    model = specforge_model.OnlineEagle3Model(draft, length=TTT_STEPS, attention_backend="sdpa").to(device())
    inputs = random_inputs(case, LAYERS)
    head = (torch.randn(VOCAB, case["hidden"]) * 0.02).to(device())

    def loss_of() -> Any:
        losses = model(
            inputs["ids"], torch.ones_like(inputs["ids"], dtype=torch.bool), None, inputs["mask"].unsqueeze(-1).long(),
            inputs["fused"], target_hidden_for_compact=inputs["last"], target_head_weight=head,
        )[0]  # fmt: skip
        return sum(0.8**i * loss for i, loss in enumerate(losses))

    return plain_step(model, loss_of)


def specforge_dflash(case: dict[str, Any]) -> Callable[[], float]:
    import torch
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel  # type: ignore[import-not-found]
    from specforge.modeling.draft.dflash import DFlashDraftModel  # type: ignore[import-not-found]
    from transformers import Qwen3Config

    hidden = case["hidden"]
    config = Qwen3Config(**shape_of(hidden), num_hidden_layers=5)
    config.num_target_layers, config.block_size = TARGET_LAYERS, BLOCK
    config.dflash_config = {"mask_token_id": 5, "target_layer_ids": [1, 8, 14, 20, 27]}
    config._attn_implementation = "sdpa"
    head, embedding = torch.nn.Linear(hidden, VOCAB, bias=False), torch.nn.Embedding(VOCAB, hidden)
    model = OnlineDFlashModel(
        DFlashDraftModel(config), head, embedding, 5, BLOCK, "sdpa", num_anchors=case["anchors"], loss_decay_gamma=7.0
    )
    freeze(model, ("embed_tokens", "lm_head"))
    model.to(device())
    inputs = random_inputs(case, 5)
    return plain_step(model, lambda: model(inputs["ids"], inputs["fused"], inputs["mask"])[0])


def freeze(model: Any, names: tuple[str, ...]) -> None:
    """Freeze what is the target's, and give what its loader would have filled some numbers."""
    import torch

    for name, parameter in model.named_parameters():
        if any(part in name for part in names):
            parameter.requires_grad_(False)
        if not bool(torch.isfinite(parameter).all()):
            torch.nn.init.normal_(parameter, std=0.02)


def loss_mask(case: dict[str, Any]) -> Any:
    """[1, T], 0 on the prompt."""
    import torch

    length = case["length"]
    return (torch.arange(length) >= case["prompt_share"] * length).float()[None]


def random_inputs(case: dict[str, Any], layers: int) -> dict[str, Any]:
    import torch

    length, hidden = case["length"], case["hidden"]
    inputs = {
        "ids": torch.randint(0, VOCAB, (1, length)), "fused": torch.randn(1, length, layers * hidden),
        "last": torch.randn(1, length, hidden), "mask": loss_mask(case),
        "documents": torch.zeros(1, length, dtype=torch.long),
    }  # fmt: skip
    return {name: tensor.to(device()) for name, tensor in inputs.items()}


BUILDERS: dict[tuple[str, str], Callable[[dict[str, Any]], Callable[[], float]]] = {
    ("ours", "eagle3"): ours,
    ("ours", "dflash"): ours,
    ("speculators", "eagle3"): speculators_eagle3,
    ("speculators", "dflash"): speculators_dflash,
    ("specforge", "eagle3"): specforge_eagle3,
    ("specforge", "dflash"): specforge_dflash,
}


# --- where our time goes -----------------------------------------------------------------------------------------


def shares(case: dict[str, Any]) -> dict[str, float]:
    """Forward and backward of each part of an EAGLE-3 step alone, at the step's sizes, in seconds."""
    import torch

    from draftloop.drafters.drafter import Shape, shape_of_target
    from draftloop.drafters.head_loss import head_loss
    from draftloop.drafters.objectives import soft_cross_entropy
    from draftloop.drafters.prefix_attention import prefix_attention
    from draftloop.drafters.recurrent import Mlp

    torch.set_num_threads(case["threads"])
    hidden, length = case["hidden"], case["length"]
    shape = Shape(**shape_of_target(shape_of(hidden)), layer_ids=())
    taught = int(length * (1 - case["prompt_share"]))
    x = torch.randn(taught, hidden, requires_grad=True)
    head = (torch.randn(case["draft_vocab"], hidden) * 0.02).requires_grad_()
    last, mlp = torch.randn(taught, hidden), Mlp(shape)
    query = torch.randn(1, shape.num_heads, taught, 64, requires_grad=True)
    key, value = (torch.randn(1, shape.num_kv_heads, length, 64, requires_grad=True) for _ in range(2))
    first, visible = torch.zeros(1, taught, dtype=torch.int64), torch.arange(length - taught, length)[None] + 1

    def head_step() -> Any:
        def row_loss(logits: Any, begin: int, end: int) -> Any:
            probs = (last[begin:end] @ head.detach().T).softmax(-1)
            return soft_cross_entropy(logits, probs), logits.argmax(-1) == 0

        return head_loss(x, head, torch.full((taught,), 1 / taught), row_loss)[0]

    parts = {
        "head": lambda: head_step(),
        "attention": lambda: prefix_attention(query, first, visible, key, value)[0].sum(),
        "mlp": lambda: mlp(x).sum(),
    }
    seconds: dict[str, float] = {}
    for name, forward in parts.items():
        times = []
        for _ in range(3):
            begin = now()
            forward().backward()  # type: ignore[no-untyped-call]
            times.append((now() - begin) / case["threads"])
        seconds[name] = min(times) * TTT_STEPS
    return seconds


def roofline_gflops(threads: int) -> float:
    """Of a large product."""
    import torch

    torch.set_num_threads(threads)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    times = []
    for _ in range(5):
        begin = now()
        a @ b
        times.append((now() - begin) / threads)
    return 2 * 1024**3 / min(times) / 1e9


def step_gflop(case: dict[str, Any]) -> float:
    """The products that a step cannot do without, forward and backward, in 1e9 operations."""
    taught = case["length"] * (1 - case["prompt_share"])
    if case["what"] == "eagle3":
        return eagle3_gflop(case["hidden"], taught, case["draft_vocab"])
    return dflash_gflop(case["hidden"], case["length"], min(case["anchors"], int(taught)))


def dflash_gflop(hidden: int, length: int, anchors: int) -> float:
    """The head gives no gradient to its own weights, the fused states take none. Attention's products are left out."""
    shape = shape_of(hidden)
    heads, kv, mlp = shape["num_attention_heads"], shape["num_key_value_heads"], shape["intermediate_size"]
    layer = hidden * (64 * (heads + 2 * kv) + 64 * heads + 3 * mlp)
    context = length * 5 * hidden * (2 * hidden + 3 * 2 * 64 * kv)
    head = anchors * (BLOCK - 1) * VOCAB * hidden * 2
    return float(2 * (3 * 5 * layer * anchors * BLOCK + context + head) / 1e9)


def eagle3_gflop(hidden: int, length: float, draft_vocab: int) -> float:
    """Backward is twice the forward."""
    shape = shape_of(hidden)
    heads, kv, mlp = shape["num_attention_heads"], shape["num_key_value_heads"], shape["intermediate_size"]
    row = hidden * (64 * (heads + 2 * kv) + 64 * heads + 3 * mlp + draft_vocab) * 2
    attention = 2 * 2 * heads * 64 * length / 2
    extra = 2 * hidden * (3 * hidden + 64 * (heads + 2 * kv)) + 2 * hidden * draft_vocab / 3
    return float(3 * length * (TTT_STEPS * (row + attention) + extra) / 1e9)


# --- the table ---------------------------------------------------------------------------------------------------


def install(folder: Path) -> None:
    """The rivals, without dependencies. A rival whose folder exists is taken as it is."""
    for name, packages in RIVALS.items():
        if not (folder / name).exists():
            command = ["uv", "pip", "install", "--python", sys.executable, "--no-deps", "--target", str(folder / name)]
            subprocess.run([*command, *packages], check=True, stdout=subprocess.DEVNULL)


class Contestant:
    """One of the three at one case, in a process of its own, waiting for its turn."""

    def __init__(self, case: dict[str, Any], who: str, rivals: Path) -> None:
        env = {**os.environ}
        if who in RIVALS:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(rivals / who), env.get("PYTHONPATH")]))
        command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps({**case, "who": who})]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self.name, self.mib, self.loss = who, 0.0, 0.0
        self.seconds: list[float] = []

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        self._log.seek(0)
        last = (self._log.read().strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"{self.name} failed: {last}")

    def step(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        made = self.answer()
        self.seconds.append(made["seconds"])
        self.mib, self.loss = made["mib"], made["loss"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def play(case: dict[str, Any], who: list[str], args: argparse.Namespace) -> list[Contestant]:
    """Rounds of one step each, until `--rounds` are made or, after two, `--seconds` are over."""
    contestants = [Contestant(case, name, args.rivals) for name in who]
    try:
        for contestant in contestants:
            contestant.answer()
        begin = time.monotonic()
        for number in range(1 + args.rounds):
            for contestant in contestants:
                contestant.step()
            if number >= 2 and time.monotonic() - begin > args.seconds:
                break
    finally:
        for contestant in contestants:
            contestant.close()
    return contestants


def compare(case: dict[str, Any], args: argparse.Namespace) -> tuple[float, float]:
    """Ours against the better rival: tokens/s, by the median round, and memory."""
    mine, *rivals = play(case, ["ours", *RIVALS], args)
    print(f"{case['what']} H={case['hidden']} T={case['length']}, {len(mine.seconds) - 1} rounds")
    for one in (mine, *rivals):
        rate = case["length"] / median(one.seconds[1:])
        print(f"  {one.name:12} {rate:9.1f} tokens/s  {one.mib:8.0f} MiB  loss {one.loss:.3f}")
    rounds = zip(*(one.seconds[1:] for one in rivals), mine.seconds[1:], strict=True)
    ratio = median(min(others) / own for *others, own in rounds)
    memory = mine.mib / min(one.mib for one in rivals)
    print(f"  ratio {ratio:.2f}, memory {memory:.2f}", flush=True)
    if device() == "cpu":
        seconds, roof = median(mine.seconds[1:]), roofline_gflops(case["threads"])
        parts = shares(case) if case["what"] == "eagle3" else {}
        split = ", ".join(f"{name} {part / seconds:.0%}" for name, part in parts.items())
        needed = step_gflop(case) / roof
        print(
            f"  ours: {needed / seconds:.0%} of the step is what its products take at this core's {roof:.0f} GFLOP/s"
            f"{'; ' if split else ''}{split}; the better rival over that: {ratio * seconds / needed:.2f}",
            flush=True,
        )
    return ratio, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hidden", type=int, nargs="+", default=[576, 1024])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--what", nargs="+", default=["eagle3", "dflash"])
    parser.add_argument("--draft-vocab", type=int, default=4096)
    parser.add_argument("--anchors", type=int, default=16)
    parser.add_argument("--prompt-share", type=float, default=1 / 3)
    parser.add_argument("--rounds", type=int, default=5, help="at most, the warm-up aside")
    parser.add_argument("--seconds", type=float, default=45.0, help="of a shape, after which two rounds are enough")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rivals", type=Path, default=Path(tempfile.gettempdir()) / "rivals")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--long", action="store_true", help="only one EAGLE-3 step over 32768 tokens of H 576")
    parser.add_argument("--child", type=json.loads)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    common = {"draft_vocab": args.draft_vocab, "anchors": args.anchors, "threads": args.threads}
    if args.long:
        case = {"what": "eagle3", "hidden": 576, "length": 32768, "prompt_share": 0.0, **common}
        args.rounds = 0
        (only,) = play(case, ["ours"], args)
        print(json.dumps({"eagle3_32k": {"mib": round(only.mib), "seconds": round(only.seconds[0], 1)}}))
        return
    if args.quick:
        args.hidden, args.lengths, args.rounds = args.hidden[:1], args.lengths[:1], 3
    install(args.rivals)
    ratios: dict[str, list[float]] = {f"{what}_ratio": [] for what in args.what}
    memory = []
    for hidden, length, what in itertools.product(args.hidden, args.lengths, args.what):
        case = {"what": what, "hidden": hidden, "length": length, "prompt_share": args.prompt_share, **common}
        speed, space = compare(case, args)
        ratios[f"{what}_ratio"].append(speed)
        memory.append(space)
    print(json.dumps({**{name: min(found) for name, found in ratios.items()}, "memory_ratio": max(memory)}))


if __name__ == "__main__":
    main()
