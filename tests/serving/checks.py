"""What the serving tests assert of answers and records, each against a plain forward of the target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from draftloop.core.records import CaptureRecord, VerifyStep
from draftloop.sglang.client import ServerClient
from draftloop.sglang.held_tensors import ALIASED
from draftloop.sglang.swap import server_checksums

from .conftest import CHUNK, CONFIG, Answer, Served

LENGTHS = [5, 17, 40, CHUNK - 1, CHUNK, CHUNK + 1, 150, 3 * CHUNK]
NODES = CONFIG.server.num_draft_tokens


def assert_greedy(served: Served, answers: Sequence[Answer], tokens: int) -> None:
    """Every output token is the arg-max of a plain forward over all before it: greedy decoding, by induction."""
    for answer in answers:
        assert len(answer.output) == tokens
        logits = served.target.states(answer.whole).logits[len(answer.prompt) - 1 : -1]
        assert answer.output == logits.argmax(-1).tolist(), answer.request_id


def assert_true_states(served: Served, answer: Answer, record: CaptureRecord) -> None:
    """The record's rows are a plain forward's, and its tokens the request's (a last step may reach beyond them)."""
    tokens = record.token_ids.tolist()
    whole = [*answer.whole[: record.start], *tokens]
    length = min(len(whole), len(answer.whole))
    assert whole[:length] == answer.whole[:length]
    # The last token of an answer has not been an input yet.
    assert len(whole) >= len(answer.whole) - 1
    states = served.target.states(whole)
    for got, expected in (
        (torch.from_numpy(record.fused), states.fused[record.start :]),
        (torch.from_numpy(record.last_hidden), states.last_hidden[record.start :]),
    ):
        torch.testing.assert_close(got.float(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def paths_of(step: VerifyStep) -> list[tuple[int, ...]]:
    """The drafted tokens from below the root to each node, in tree order."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(step.draft_tokens.tolist(), step.parents.tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def assert_steps_add_up(answer: Answer, record: CaptureRecord) -> None:
    """Each step starts where the last one ended, and accepts the longest drafted path that the target goes too."""
    known = [*answer.whole[: record.start], *record.token_ids.tolist()]
    position = len(answer.prompt)
    for number, step in enumerate(record.verify_steps):
        assert step.position == position
        assert len(step.draft_tokens) == len(step.parents) == NODES - 1
        assert all(parent <= node for node, parent in enumerate(step.parents.tolist()))
        paths = set(paths_of(step))
        assert len(paths) == NODES - 1
        went = tuple(known[position + 1 : position + 1 + step.accepted])
        assert len(went) == step.accepted
        assert not went or went in paths
        position += step.accepted + 1
        if number + 1 < len(record.verify_steps):
            assert (*went, known[position]) not in paths, "a longer drafted path was right"
    assert position >= len(answer.whole) - 1


def checksums(served: Served) -> dict[str, str]:
    with ServerClient(served.url) as client:
        return client.draft_checksums(ALIASED["eagle3"])


def checksums_of(folder: Path) -> dict[str, str]:
    return server_checksums(load_file(folder / "model.safetensors"), "eagle3", torch.float32, cuda=False)


def accept_length(answers: Sequence[Answer]) -> float:
    return sum(len(a.output) for a in answers) / sum(a.meta["spec_verify_ct"] for a in answers)
