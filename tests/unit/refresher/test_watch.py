"""From observations and verdicts to the events the loop acts on."""

from __future__ import annotations

from draftloop.capture.observation import Observation
from draftloop.core.config import Config
from draftloop.drafters.load.cost_model import CostModel, RowCost, StartUp
from draftloop.drafters.load.served import ServedCosts
from draftloop.drafters.load.shapes import Shape
from draftloop.refresher.gate import Decision, Interval
from draftloop.refresher.watch import ADVICE, FOLLOWED, Said, Watch

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


def measured(follows: bool = False, resting: float = 0.0) -> ServedCosts:
    """At batch 16 a step of the tree costs 2.5 times a plain one."""
    costs = CostModel(StartUp(RowCost.line(0.02, 0.0003), RowCost.line(0.001, 0.0), 0.0, 0.0, 0.0))
    return ServedCosts(Shape(3, 4, 8), follows, {16: 40.0}, resting, costs)


def test_speculation_that_loses_is_said_once_and_taken_back_with_a_better_drafter() -> None:
    watch = Watch(CONFIG, "v1")
    assert watch.predicted_tokens_per_s(3.0) is None, "nobody has measured a step"
    watch.measured([])
    assert watch.traffic(requests(4)) == []
    watch.measured([measured()])
    # Twice the tokens a step for 2.5 times the cost.
    (lost,) = watch.traffic(requests(4))
    assert (lost.data["signal"], lost.data["action"]) == ("speculation", "speculation_off")
    assert lost.data["now"] < lost.data["before"]
    assert lost.data["advice"] == ADVICE
    assert not watch.speculating
    assert watch.traffic(requests(10)) == []
    watch.new_drafter("v2")
    better = [Observation("chat", "v2", 64, 64 * 3, 256, 5)]
    assert [one.data["action"] for one in watch.traffic(better)] == ["speculation_on"]
    assert watch.predicted_tokens_per_s(3.0) == measured().tokens_per_s(3.0)
    watch.measured([])
    assert watch.predicted_tokens_per_s(3.0) is not None, "a server that restarts says nothing for a while"


def test_of_servers_that_follow_their_load_it_only_says_so() -> None:
    watch = Watch(CONFIG, "v1")
    watch.measured([measured(follows=True)])
    assert watch.traffic(requests(4)) == []
    watch.measured([measured(follows=True, resting=0.8)])
    (rests,) = watch.traffic(requests(4))
    assert (rests.data["action"], rests.data["advice"]) == ("speculation_off", FOLLOWED)
