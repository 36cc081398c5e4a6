"""On the same prefix and weights, our drafter and the one inside a real SGLang server give the same draft logits.

This is what catches "70 % training accuracy, accepted length 1.0". The server drafts chains, so every step of every
turn is compared, after the prefill and after verifications, at the depth it was served.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny_llama import TinyTarget, random_prompts

from draftloop.core.config import Config
from draftloop.core.records import CaptureRecord
from draftloop.drafters.batch import collate
from draftloop.drafters.checkpoint import load_any, save_drafter
from draftloop.drafters.dflash import DflashDrafter
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.target import FrozenTarget, load_target_weights, target_identity
from draftloop.fleet.worker import Worker
from draftloop.trainer.day0 import make_untrained

from .conftest import CHUNK, CONFIG, TRAINING_PROMPTS, Answer, Served
from .draft_probe import FOLDER

STEPS = 4
DRAFTERS = {
    "eagle3": {"draft_vocab_size": 256},
    "dflash": {"kind": "dflash", "num_layers": 2, "block_size": STEPS + 1},
}


@pytest.fixture(scope="module", params=DRAFTERS)
def probed(
    request: pytest.FixtureRequest, target: TinyTarget, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, Path]]:
    """A server that drafts chains of STEPS tokens with a drafter of random weights, and its probe's folder."""
    folder = tmp_path_factory.mktemp(f"parity-{request.param}")
    chain = {"topk": 1, "num_steps": STEPS, "num_draft_tokens": STEPS + 1}
    config = Config.model_validate(
        {
            **CONFIG.model_dump(),
            "drafter": DRAFTERS[request.param],
            "server": {**CONFIG.server.model_dump(), **chain},
        }
    )
    make_untrained(target.folder, config.drafter, TRAINING_PROMPTS, folder / "plain", "plain", seed=0)
    shake(folder / "plain", folder / "v0", target)
    probe = folder / "probe"
    info = probe / "draft_probe-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: draft-probe\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\ndraft_probe = draft_probe:load\n")
    (probe / "draft_probe.py").write_text(Path(__file__).with_name("draft_probe.py").read_text())
    (folder / "passes").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(probe), prepend=":")
        patch.setenv(FOLDER, str(folder / "passes"))
        worker = Worker(target.folder, config, folder / "server.log")
        url = worker.start(folder / "v0")
    try:
        yield Served(worker, url, target, folder / "v0"), folder / "passes"
    finally:
        worker.stop()


@torch.no_grad()
def shake(source: Path, folder: Path, target: TinyTarget) -> None:
    """Move every weight, so that no term of the forward pass is a coincidence."""
    drafter, _ = load_any(source)
    torch.manual_seed(0)
    for weight in drafter.parameters():
        weight.add_((0.05 if weight.dim() == 2 else 0.3) * torch.randn_like(weight))
    identity = target_identity(target.folder)
    save_drafter(folder, drafter.shape, drafter.state_dict(), version="v0", parent=None, target=identity)


def served_logits(passes: Sequence[Path], lm_head: torch.Tensor) -> dict[tuple[int, int | None], list[torch.Tensor]]:
    """(position, token there or None) -> the logits [Vd] the server computed at that place, each time."""
    found: dict[tuple[int, int | None], list[torch.Tensor]] = {}
    for path in passes:
        made = load_file(path)
        logits = made["logits"] if "logits" in made else made["states"] @ lm_head.T
        count = len(logits)
        positions = made["positions"].tolist()[-count:]
        tokens = made["input_ids"].tolist()[-count:] if "logits" in made else [None] * count
        for place, token, row in zip(positions, tokens, logits.float(), strict=True):
            found.setdefault((place, token), []).append(row)
    return found


@torch.no_grad()
def our_logits(
    drafter: Drafter, target: FrozenTarget, served: Served, known: list[int], drafts: list[int]
) -> torch.Tensor:
    """[STEPS, Vd]: what our drafter says below the last of the known tokens, along the drafted path."""
    rows = len(known) - 1
    fused, last_hidden = (F.pad(x, (0, 0, 0, STEPS)).numpy() for x in states_of(drafter, served, known[:-1]))
    # The rows after the known ones hold the drafted path; nothing may look at their states, which are 0.
    whole = np.array([*known, *drafts][: rows + STEPS], dtype=np.int32)
    record = CaptureRecord("", "", 0, 1, whole, fused, last_hidden)
    features = drafter.guess(collate([record], len(whole), "cpu"), target, torch.tensor([[rows - 1]]), STEPS)
    return torch.stack([drafter.guess_logits(feature[0, 0], target) for feature in features])


@torch.no_grad()
def states_of(drafter: Drafter, served: Served, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The fused and the final states of a plain forward."""
    states = served.target.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1][0] for layer in drafter.shape.layer_ids], dim=-1), states[-1][0]


def test_draft_logits_are_those_of_the_server(probed: tuple[Served, Path]) -> None:
    served, passes = probed
    drafter, _ = load_any(served.drafter)
    weights = load_target_weights(served.target.folder)
    frozen = FrozenTarget.of(weights.embedding, weights.lm_head, drafter.draft_ids())
    compared = 0
    for prompt in random_prompts(4, [6, 23, CHUNK + 9], seed=3):
        before = set(passes.glob("*.safetensors"))
        answer: Answer = served.ask_one(prompt, 10)
        (record,) = served.records([answer])
        found = served_logits(sorted(set(passes.glob("*.safetensors")) - before), weights.lm_head)
        for step in record.verify_steps:
            known = answer.whole[: step.position + 1]
            if len(known) <= step.position:
                continue
            drafts = step.draft_tokens.tolist()
            assert len(drafts) == STEPS
            ours = our_logits(drafter, frozen, served, known, drafts)
            for j, row in enumerate(ours):
                assert_served(found, row, place_of(drafter, step.position, j, [known[-1], *drafts]), f"step {j}")
                compared += 1
    assert compared >= 4 * 4 * STEPS


def place_of(drafter: Drafter, root: int, step: int, path: list[int]) -> tuple[int, int | None]:
    """Where the server computed the guess of this step. A DFlash block stands at root, root+1, ...; slot 1 + j guesses.
    An EAGLE step reads path[j] one position before that token's own."""
    if isinstance(drafter, DflashDrafter):
        return root + 1 + step, None
    return root - 1 + step, path[step]


def assert_served(
    found: dict[tuple[int, int | None], list[torch.Tensor]], row: torch.Tensor, place: tuple[int, int | None], what: str
) -> None:
    """One of the server's passes at this place (it is computed again when a draft was refused) gave these logits."""
    assert place in found, f"{what}: the server computed nothing at {place}"
    distance = min(float((row - other).abs().max()) for other in found[place])
    assert distance <= 1e-4 * max(1.0, float(row.abs().max())), f"{what} at {place}: logits differ by {distance:.2e}"
