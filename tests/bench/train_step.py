"""One training step of EAGLE-3 (7 steps unrolled) and of DFlash (blocks of 16), beside the public trainers.

    python tests/bench/train_step.py                       small shapes, minutes
    python tests/bench/train_step.py --hidden 576 1024 --lengths 512 2048 --steps 5

`speculators` and `specforge` come from PyPI without their dependencies into a throw-away folder (uv or pip), and run
with the attention that a CPU has: SDPA. Every measurement is a process of its own: same shapes, dtype, optimiser,
threads, and loss mask (the first `--prompt-share` of the rows is prompt). Tokens a second is the best of `--steps`
steps, on a CPU by processor time over threads, which a busy machine disturbs less than the clock on the wall; memory
is what the steps add to the resident set (on a GPU: the allocator's peak). The last line is JSON:

    eagle3_ratio, dflash_ratio    ours over the faster of the two, tokens/s, the worst of the shapes
    memory_ratio                  ours over the leaner of the two, the worst of the shapes
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
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


def child(case: dict[str, Any]) -> dict[str, Any]:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import torch

    torch.set_num_threads(case["threads"])
    torch.manual_seed(0)
    step = BUILDERS[case["who"], case["what"]](case)
    reset_peak()
    before = resident_mib("VmRSS")
    seconds = []
    for _ in range(case["steps"]):
        begin = now()
        loss = step()
        seconds.append((now() - begin) / case["threads"])
    used = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else resident_mib("VmHWM") - before
    return {"tokens_per_s": case["length"] / min(seconds), "mib": used, "loss": loss, "seconds": min(seconds)}


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

    from draftloop.drafters.batch import Batch
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
    batch = Batch(
        torch.randint(0, VOCAB, (1, length)), torch.randn(1, length, width), torch.randn(1, length, hidden),
        torch.tensor([length]), loss_mask(case).bool(),
    )  # fmt: skip
    batch = Batch(*(x.to(device()) for x in vars(batch).values()))
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
    """Forward and backward of each part alone, at the step's sizes, in seconds; and the roofline of a product."""
    import torch

    from draftloop.drafters.drafter import Shape, shape_of_target
    from draftloop.drafters.head_loss import head_loss
    from draftloop.drafters.objectives import soft_cross_entropy
    from draftloop.drafters.prefix_attention import prefix_attention
    from draftloop.drafters.recurrent import Mlp

    torch.set_num_threads(case["threads"])
    hidden, length = case["hidden"], case["length"]
    shape = Shape(**shape_of_target(shape_of(hidden)), layer_ids=())
    x = torch.randn(length, hidden, requires_grad=True)
    head = (torch.randn(case["draft_vocab"], hidden) * 0.02).requires_grad_()
    last, mlp = torch.randn(length, hidden), Mlp(shape)
    query, key, value = (
        torch.randn(1, n, length, 64, requires_grad=True)
        for n in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    visible = torch.arange(1, length + 1)[None]

    def head_step() -> Any:
        def row_loss(logits: Any, begin: int, end: int) -> Any:
            probs = (last[begin:end] @ head.detach().T).softmax(-1)
            return soft_cross_entropy(logits, probs), logits.argmax(-1) == 0

        return head_loss(x, head, torch.full((length,), 1 / length), row_loss)[0]

    parts = {
        "head": lambda: head_step(),
        "attention": lambda: prefix_attention(query, visible, key, value)[0].sum(),
        "mlp": lambda: mlp(x).sum(),
    }
    seconds = {}
    for name, forward in parts.items():
        times = []
        for _ in range(3):
            begin = now()
            forward().backward()
            times.append((now() - begin) / case["threads"])
        seconds[name] = min(times) * TTT_STEPS
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    times = []
    for _ in range(5):
        begin = now()
        a @ b
        times.append((now() - begin) / case["threads"])
    return {**seconds, "roofline_gflops": 2 * 1024**3 / min(times) / 1e9}


def step_gflop(hidden: int, length: int, draft_vocab: int) -> float:
    """The products of one EAGLE-3 step, forward and backward (three times the forward), in 1e9 operations."""
    shape = shape_of(hidden)
    heads, kv, mlp = shape["num_attention_heads"], shape["num_key_value_heads"], shape["intermediate_size"]
    row = hidden * (64 * (heads + 2 * kv) + 64 * heads + 3 * mlp + draft_vocab) * 2
    attention = 2 * 2 * heads * 64 * length / 2
    extra = 2 * hidden * (3 * hidden + 64 * (heads + 2 * kv)) + 2 * hidden * draft_vocab / 3
    return 3 * length * (TTT_STEPS * (row + attention) + extra) / 1e9


# --- the table ---------------------------------------------------------------------------------------------------


def install(folder: Path) -> None:
    """The rivals, without dependencies. A rival whose folder exists is taken as it is."""
    for name, packages in RIVALS.items():
        if not (folder / name).exists():
            command = ["uv", "pip", "install", "--python", sys.executable, "--no-deps", "--target", str(folder / name)]
            subprocess.run([*command, *packages], check=True, stdout=subprocess.DEVNULL)


def measure(case: dict[str, Any], rivals: Path) -> dict[str, Any] | None:
    env = {**os.environ}
    if case["who"] in RIVALS:
        env["PYTHONPATH"] = str(rivals / case["who"])
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(case)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"  {case['who']} {case['what']} failed: {done.stderr.strip().splitlines()[-1]}", flush=True)
        return None
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hidden", type=int, nargs="+", default=[576])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512])
    parser.add_argument("--what", nargs="+", default=["eagle3", "dflash"])
    parser.add_argument("--who", nargs="+", default=["ours", *RIVALS])
    parser.add_argument("--draft-vocab", type=int, default=4096)
    parser.add_argument("--anchors", type=int, default=16)
    parser.add_argument("--prompt-share", type=float, default=1 / 3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rivals", type=Path, default=Path(tempfile.gettempdir()) / "rivals")
    parser.add_argument("--child", type=json.loads)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child)))
        return
    install(args.rivals)
    ratios: dict[str, list[float]] = {"eagle3": [], "dflash": [], "memory": []}
    for hidden in args.hidden:
        for length in args.lengths:
            for what in args.what:
                case = {"what": what, "hidden": hidden, "length": length, "draft_vocab": args.draft_vocab,
                        "anchors": args.anchors, "steps": args.steps,
                        "prompt_share": args.prompt_share, "threads": args.threads}  # fmt: skip
                compare(case, args.who, args.rivals, ratios)
    print(json.dumps({
        "eagle3_ratio": min(ratios["eagle3"], default=None), "dflash_ratio": min(ratios["dflash"], default=None),
        "memory_ratio": max(ratios["memory"], default=None),
    }))  # fmt: skip


def compare(case: dict[str, Any], who: list[str], rivals: Path, ratios: dict[str, list[float]]) -> None:
    results = {name: measure({**case, "who": name}, rivals) for name in who}
    print(f"{case['what']} H={case['hidden']} T={case['length']}")
    for name, result in results.items():
        if result is not None:
            rate, mib, loss = result["tokens_per_s"], result["mib"], result["loss"]
            print(f"  {name:12} {rate:9.1f} tokens/s  {mib:8.0f} MiB  loss {loss:.3f}")
    mine = results.get("ours")
    others = [result for name, result in results.items() if name != "ours" and result is not None]
    if mine is not None and others:
        ratios[case["what"]].append(mine["tokens_per_s"] / max(other["tokens_per_s"] for other in others))
        ratios["memory"].append(mine["mib"] / min(other["mib"] for other in others))
    if mine is not None and case["what"] == "eagle3":
        parts = shares(case)
        roof = parts.pop("roofline_gflops")
        rate = step_gflop(case["hidden"], case["length"], case["draft_vocab"]) / mine["seconds"]
        split = ", ".join(f"{name} {seconds / mine['seconds']:.0%}" for name, seconds in parts.items())
        print(f"  ours: {split}; {rate:.1f} of {roof:.1f} GFLOP/s", flush=True)


if __name__ == "__main__":
    main()
