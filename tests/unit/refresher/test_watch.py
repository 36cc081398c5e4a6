"""From observations and verdicts to the events the loop acts on."""

from __future__ import annotations

from draftloop.capture.observation import Observation
from draftloop.core.config import Config
from draftloop.core.step_costs import StepCosts
from draftloop.refresher.budget import SpeculationPolicy
from draftloop.refresher.gate import Decision, Interval
from draftloop.refresher.watch import Said, Watch

CONFIG = Config.model_validate(
    {"drift": {"patience": 2, "window_requests": 20, "rebuild_vocabulary": True}, "gate": {"min_gain": 0.01}}
)


def requests(count: int, domain: str = "chat", emitted: int = 128, unspoken: int = 5) -> list[Observation]:
    """Windows of 64 verification steps and 256 tokens, a little apart from each other."""
    return [Observation(domain, "v1", 64, emitted + i % 7, 256, unspoken + i % 3) for i in range(count)]


def verdict(gain: float) -> Decision:
    return Decision(gain > 0.01, "measured", Interval(gain, gain - 0.1, gain + 0.1))


def kinds(said: list[Said]) -> list[str]:
    return [one.kind for one in said]


def test_training_pauses_without_gain_and_drift_resumes_it() -> None:
    watch = Watch(CONFIG, "v1")
    assert watch.traffic(requests(40)) == []
    assert kinds(watch.candidate(verdict(0.0))) == []
    (paused,) = watch.candidate(verdict(-0.2))
    assert (paused.kind, watch.training) == ("training_paused", False)
    assert "2 candidates in a row" in paused.data["reason"]
    # A score that is no number says nothing about what there is to gain.
    assert watch.candidate(Decision(False, "not a number")) == []
    drift, resumed = watch.traffic(requests(20, domain="code"))
    assert (drift.data["signal"], drift.data["action"], drift.data["now"]) == ("domain_mix", "train", 1.0)
    assert (resumed.kind, watch.training) == ("training_resumed", True)
    assert not watch.rebuild_wanted


def test_unspoken_tokens_ask_for_a_vocabulary_once() -> None:
    watch = Watch(CONFIG, "v1")
    assert watch.traffic(requests(40)) == []
    said = watch.traffic(requests(5, unspoken=60))
    assert [one.data["action"] for one in said] == ["rebuild_vocabulary"]
    assert watch.rebuild_wanted
    watch.vocabulary_rebuilt()
    assert not watch.rebuild_wanted
    assert watch.traffic(requests(30, unspoken=60)) == []


def test_unless_the_servers_cannot_take_one() -> None:
    fixed = CONFIG.model_copy(update={"drift": CONFIG.drift.model_copy(update={"rebuild_vocabulary": False})})
    watch = Watch(fixed, "v1")
    said = watch.traffic([*requests(40), *requests(5, unspoken=60)])
    assert [one.data["signal"] for one in said] == ["out_of_vocabulary"]
    assert not watch.rebuild_wanted


def test_speculation_that_loses_is_said_once_and_taken_back_with_a_better_drafter() -> None:
    costs = StepCosts(base=0.02, per_request=0.0, per_node=0.0003, per_level=0.001, per_draft=0.0)
    watch = Watch(CONFIG, "v1", SpeculationPolicy(costs, batch=16, nodes=8, depth=3))
    # Twice the tokens a step for 2.5 times the cost.
    (lost,) = watch.traffic(requests(4))
    assert (lost.data["signal"], lost.data["action"]) == ("speculation", "speculation_off")
    assert lost.data["now"] < lost.data["before"]
    assert watch.traffic(requests(10)) == []
    watch.new_drafter("v2")
    better = [Observation("chat", "v2", 64, 64 * 3, 256, 5)]
    assert [one.data["action"] for one in watch.traffic(better)] == ["speculation_on"]
    assert watch.predicted_tokens_per_s(3.0) == costs.tokens_per_s(16, 8, 3, 3.0)
    assert Watch(CONFIG, "v1").predicted_tokens_per_s(3.0) is None
