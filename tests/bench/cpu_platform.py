"""The CPU platform against transformers, and what a tree costs to verify. SmolLM2-135M, fp32, all cores.

    python tests/bench/cpu_platform.py [--rounds 5] [--threads 2]

Three servers (plain, trees of 8 and of 16 nodes) and transformers in this process take turns, so that a noisy moment
meets all of them; those whose turn it is not are suspended. Last line, JSON:

    plain_b1_ratio, plain_b16_ratio   tokens/s of plain decoding, batch 1 and 16, over `generate` at batch 1
    verify8_cost, verify16_cost       seconds of a target forward over a tree of N nodes over those of one token
    forward_share                     part of a plain decoding step at batch 1 that is the target's forward
    startup_ratio                     seconds until a server answers over those of `import sglang` plus a weight read
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from serving import Resting
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from draftloop.core.config import Config, load_config
from draftloop.drafters.checkpoint import WEIGHTS_FILE
from draftloop.generator.batch import generate_batch
from draftloop.generator.prompts import builtin_prompts
from draftloop.sglang.server import ServerProcess, Speculation, free_port, server_command, server_environment
from draftloop.sglang.target import resolve_target
from draftloop.trainer.day0 import make_untrained

TIMED_SERVER = Path(__file__).with_name("timed_server.py")
TOKENS = 48
TREES = (8, 16)
IMPORT = "import sglang, sys; from safetensors.torch import load_file; load_file(sys.argv[1])"


@dataclass(frozen=True)
class Server:
    """A server, which rests between its turns, the file of its forwards, and how long it took to answer."""

    url: str
    forwards: Path
    start_s: float
    resting: Resting

    def speed(self, prompts: Sequence[Sequence[int]]) -> float:
        """Generated tokens a second, all prompts at once."""
        with self.resting.awake():
            start = time.perf_counter()
            answers = asyncio.run(
                generate_batch(self.url, prompts, TOKENS, domain="bench", concurrency=len(prompts), ignore_eos=True)
            )
            return sum(answer.completion_tokens for answer in answers) / (time.perf_counter() - start)

    def forward_s(self, mode: str, tokens: int) -> list[float]:
        """Seconds of every forward of `tokens` tokens at batch 1."""
        rows = [line.split() for line in self.forwards.read_text().splitlines()]
        return [
            float(seconds) for name, batch, size, seconds in rows if (name, batch, size) == (mode, "1", str(tokens))
        ]


@contextlib.contextmanager
def serving(target: Path, config: Config, drafter: Path | None, scratch: Path, name: str) -> Iterator[Server]:
    port = free_port("127.0.0.1", None)
    speculation = Speculation(drafter, "v0") if drafter else None
    plain = server_command(target, config.target, config.server, port, speculation)
    forwards = scratch / f"{name}.forwards"
    command = [sys.executable, str(TIMED_SERVER), str(forwards), *plain[3:]]
    url = f"http://127.0.0.1:{port}"
    resting, start = Resting(), time.perf_counter()
    with contextlib.ExitStack() as stack:
        with resting.watch():
            process = ServerProcess(command, server_environment(config, None), url, scratch / f"{name}.log")
            stack.callback(process.stop)
            process.wait_ready(config.server.start_timeout_s)
            ready = time.perf_counter() - start
        stack.callback(resting.resume)
        yield Server(url, forwards, ready, resting)


def bare_start_s(target: Path) -> float:
    """Seconds of a process that imports SGLang and reads the target's weights."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORT, str(target / WEIGHTS_FILE)], check=True, capture_output=True)
    return time.perf_counter() - start


def transformers_speed(model: PreTrainedModel, prompt: Sequence[int]) -> float:
    start = time.perf_counter()
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
    )
    return (int(out.shape[1]) - len(prompt)) / (time.perf_counter() - start)


def measure(rounds: int, threads: int) -> dict[str, float]:
    config = load_config(None, [f"server.threads={threads}", "server.max_total_tokens=4096"])
    target = resolve_target(config.target.path)
    tokenizer = AutoTokenizer.from_pretrained(str(target))
    prompts = [
        tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=False)
        for prompt in builtin_prompts()[:16]
    ]
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(str(target), dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory(prefix="draftloop-bench-") as folder, contextlib.ExitStack() as stack:
        scratch = Path(folder)
        make_untrained(target, config.drafter, prompts, scratch / "v0", "v0", seed=0)
        bare = [bare_start_s(target)]
        plain = stack.enter_context(serving(target, config, None, scratch, "plain"))
        bare.append(bare_start_s(target))
        trees = {}
        for nodes in TREES:
            update = {"num_draft_tokens": nodes, "topk": 4, "num_steps": 4}
            shaped = config.model_copy(update={"server": config.server.model_copy(update=update)})
            trees[nodes] = stack.enter_context(serving(target, shaped, scratch / "v0", scratch, f"tree{nodes}"))
        speeds: dict[str, list[float]] = {"transformers": [], "b1": [], "b16": []}
        for turn in range(rounds + 1):
            now = {"transformers": transformers_speed(model, prompts[turn]), "b1": plain.speed([prompts[turn]])}
            now["b16"] = plain.speed(prompts)
            for tree in trees.values():
                tree.speed([prompts[turn]])
            if turn:  # the first turn warms up
                for name, value in now.items():
                    speeds[name].append(value)
            print(json.dumps({"turn": turn} | now), flush=True)
        step = statistics.median(plain.forward_s("DECODE", 1))
        costs = {
            f"verify{nodes}_cost": statistics.median(tree.forward_s("TARGET_VERIFY", nodes)) / step
            for nodes, tree in trees.items()
        }
    return {
        "plain_b1_ratio": paired(speeds["b1"], speeds["transformers"]),
        "plain_b16_ratio": paired(speeds["b16"], speeds["transformers"]),
        **costs,
        "forward_share": step * statistics.median(speeds["b1"]),
        "startup_ratio": plain.start_s / statistics.mean(bare),
    }


def paired(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios of one turn each."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    result = measure(arguments.rounds, arguments.threads)
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
