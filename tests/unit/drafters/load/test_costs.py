"""The cost model: it learns what steps take, and counts the experts that a verification reads."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MixtralConfig, MixtralForCausalLM

from draftloop.drafters.load.cost_model import CostModel, Experts, RowCost, StartUp
from draftloop.drafters.load.served import ServedCosts
from draftloop.drafters.load.shapes import BUDGETS, PLAIN, Shape, block_shapes, candidates, tree_shapes

TARGET = RowCost((1, 8, 16, 64), (0.020, 0.024, 0.036, 0.120))
DRAFT = RowCost((1, 8, 64), (0.002, 0.002, 0.008))
SHAPES = tree_shapes(3, 4, 8)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(2, 64))
def test_tree_shapes_are_within_the_largest_tree(depth: int, width: int, nodes: int) -> None:
    shapes = tree_shapes(depth, width, nodes)
    assert shapes[0] == PLAIN
    assert len(set(shapes)) == len(shapes)
    for shape in shapes[1:]:
        assert shape.depth <= depth
        assert shape.width <= width
        assert shape.depth < shape.nodes <= min(nodes, 1 + candidates(shape.depth, shape.width))
    if nodes > depth:
        assert Shape(depth, width, min(nodes, 1 + candidates(depth, width))) in shapes


@given(st.integers(2, 64))
def test_block_shapes_end_with_the_whole_block(block: int) -> None:
    lengths = [shape.nodes for shape in block_shapes(block)]
    assert lengths == sorted(set(lengths))
    assert (lengths[0], lengths[-1]) == (1, block)
    assert set(lengths[1:-1]) <= set(BUDGETS)


def test_row_costs_are_joined_by_lines_and_go_on_with_the_last_slope() -> None:
    assert TARGET(1) == 0.020
    assert TARGET(12) == pytest.approx(0.030)
    assert TARGET(112) == pytest.approx(0.120 + 48 * (0.084 / 48))


# --- learning


def truth(shape: Shape, batch: int, context: float, speed: float, host: float) -> float:
    """A machine that is `speed` times slower than start-up said, with a host side of its own."""
    calls = shape.depth * (0.004 + DRAFT(batch * shape.width))
    return speed * TARGET(batch * shape.nodes) + calls + host + 3e-6 * batch * context


@settings(deadline=None, max_examples=20)
@given(st.floats(0.6, 2.5), st.floats(0.001, 0.02), st.integers(0, 2**32 - 1))
def test_it_learns_a_machine_from_noisy_steps(speed: float, host: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = CostModel(StartUp(TARGET, DRAFT))
    for _ in range(400):
        shape, batch = SHAPES[rng.integers(len(SHAPES))], int(rng.choice((1, 2, 8, 16)))
        context = float(rng.uniform(50, 400))
        seconds = truth(shape, batch, context, speed, host) * float(rng.lognormal(0.0, 0.05))
        model.observe(shape, batch, context, seconds)
    for shape in SHAPES:
        for batch in (1, 4, 16):
            expected = truth(shape, batch, 200.0, speed, host)
            assert model.seconds(shape, batch, 200.0) == pytest.approx(expected, rel=0.15)


def test_what_its_terms_cannot_say_is_remembered_by_shape_and_batch() -> None:
    """One shape is mysteriously twice as slow at batch 8."""
    model = CostModel(StartUp(TARGET, DRAFT))
    odd = Shape(2, 4, 4)
    for _ in range(60):
        for shape in SHAPES:
            factor = 2.0 if shape == odd else 1.0
            model.observe(shape, 8, 200.0, factor * truth(shape, 8, 200.0, 1.0, 0.005))
    assert model.seconds(odd, 8, 200.0) == pytest.approx(2 * truth(odd, 8, 200.0, 1.0, 0.005), rel=0.1)
    other = Shape(2, 4, 6)
    assert model.seconds(other, 8, 200.0) == pytest.approx(truth(other, 8, 200.0, 1.0, 0.005), rel=0.1)


def test_a_disturbed_step_teaches_nothing() -> None:
    model = CostModel(StartUp(TARGET, DRAFT))
    for _ in range(20):
        model.observe(PLAIN, 4, 100.0, 0.03)
    before = model.seconds(PLAIN, 4, 100.0)
    model.observe(PLAIN, 4, 100.0, 2.0)
    assert model.seconds(PLAIN, 4, 100.0) == before


# --- on its way out of the server


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_a_dumped_model_predicts_and_learns_as_the_one_it_was(seed: int, sparse: bool) -> None:
    rng = np.random.default_rng(seed)
    experts = Experts.balanced(2, 4, 2) if sparse else None
    model = CostModel(StartUp(TARGET, DRAFT, experts=experts, expert_seconds=1e-4 if sparse else 0.0))

    def learn(model: CostModel, steps: list[tuple[Shape, int, float, float]]) -> None:
        for shape, batch, context, noise in steps:
            model.observe(shape, batch, context, truth(shape, batch, context, 1.3, 0.01) * noise)

    def steps() -> list[tuple[Shape, int, float, float]]:
        return [
            (SHAPES[rng.integers(len(SHAPES))], int(rng.integers(1, 20)), float(rng.uniform(9, 400)), float(noise))
            for noise in rng.lognormal(0.0, 0.1, 30)
        ]

    learn(model, steps())
    again = CostModel.load(json.loads(json.dumps(model.dump())))
    for _ in range(2):
        for shape in SHAPES:
            for batch in (1, 7, 40):
                assert again.seconds(shape, batch, 150.0) == model.seconds(shape, batch, 150.0)
        more = steps()
        learn(model, more)
        learn(again, more)
    assert again.usual_context == model.usual_context


def test_tokens_a_second_of_a_mix_of_batches() -> None:
    """By hand: three steps of batch 2 and one of batch 8, each with its own time."""
    model = CostModel(StartUp(RowCost.line(0.02, 0.001), RowCost.line(0.002, 0.0), 0.0, 0.0, 0.0))
    served = ServedCosts(Shape(2, 4, 6), follows=False, batches={2: 3.0, 8: 1.0}, resting=0.25, costs=model)
    steps = 3 * (0.02 + 12 * 0.001 + 2 * 0.002) + 1 * (0.02 + 48 * 0.001 + 2 * 0.002)
    assert served.tokens_per_s(1.5) == pytest.approx(1.5 * (3 * 2 + 8) / steps)
    assert served.plain_tokens_per_s == pytest.approx((3 * 2 + 8) / (3 * 0.022 + 0.028))
    again = ServedCosts.load(json.loads(json.dumps(served.dump())))
    assert (again.shape, again.follows, again.resting) == (served.shape, served.follows, served.resting)
    assert again.tokens_per_s(1.5) == served.tokens_per_s(1.5)


# --- mixture of experts


def test_touched_experts_by_enumeration() -> None:
    """Independent tokens, each using one of three experts with unequal chances: every outcome weighed."""
    shares = (0.5, 0.3, 0.2)
    expected = 0.0
    for tokens in np.ndindex(3, 3, 3, 3):
        chance = float(np.prod([shares[expert] for expert in tokens]))
        expected += chance * len(set(tokens))
    assert Experts((shares,)).touched(4) == pytest.approx(expected)


def test_mixtral_reads_nearly_all_experts_in_a_verification() -> None:
    mixtral = Experts.balanced(32, 8, 2)
    assert mixtral.touched(1) == pytest.approx(32 * 2)
    assert mixtral.touched(8) > 32 * 7


@torch.no_grad()
def test_the_formula_counts_a_tiny_random_mixtral() -> None:
    """Experts that a forward really touches, against what the shares measured on other tokens predict."""
    torch.manual_seed(0)
    layers, experts, used = 3, 8, 2
    config = MixtralConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=experts, num_experts_per_tok=used, max_position_embeddings=512,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()

    def routed(tokens: int, sequences: int) -> torch.Tensor:
        """[layers, sequences, tokens, used] expert of each token."""
        ids = torch.randint(128, (sequences, tokens))
        logits = model(ids, output_router_logits=True).router_logits
        return torch.stack([layer.topk(used, dim=-1).indices.view(sequences, tokens, used) for layer in logits])

    seen = routed(64, 16).reshape(layers, -1)
    shares = torch.stack([torch.bincount(layer, minlength=experts) for layer in seen]) * used / seen.shape[1]
    model_of_experts = Experts(tuple(tuple(layer) for layer in shares.tolist()))
    for tokens in (1, 2, 4, 8, 16):
        choices = routed(tokens, 200).permute(1, 0, 2, 3).reshape(200, layers, -1)
        touched = np.mean([sum(len(set(layer)) for layer in sequence) for sequence in choices.tolist()])
        assert model_of_experts.touched(tokens) == pytest.approx(touched, rel=0.08)


def test_experts_make_a_verification_dearer() -> None:
    """The same matrix products; with experts to read, eight nodes cost more over plain decoding than without."""
    flat = RowCost((1, 64), (0.01, 0.01))
    dense = CostModel(StartUp(flat, DRAFT))
    sparse = CostModel(StartUp(flat, DRAFT, experts=Experts.balanced(32, 8, 2), expert_seconds=2e-4))
    tree = Shape(1, 4, 4)

    def ratio(model: CostModel) -> float:
        return model.seconds(tree, 1, 100.0) / model.seconds(PLAIN, 1, 100.0)

    assert ratio(sparse) > 1.3 * ratio(dense)
