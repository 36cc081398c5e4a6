"""`draftloop demo`: the whole loop once, on this machine, measured from day 0 to the refreshed drafter.

prepare        target, prompts, day-0 drafter
day 0          server with the untrained drafter: held-out answers, speed, cost of capture
refresh        traffic -> capture -> training -> gate -> hot swap, until the time is nearly up
final          the same measurements with the drafter that serves now
plain          a server without speculation: the reference for identity and speed
report         summary.json and report.html, also when the run was cut short
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from draftloop.capture.privacy import load_redactor
from draftloop.cli.actors import LocalRay
from draftloop.cli.live import LiveView
from draftloop.cli.measure import (
    OVERHEAD_PROMPTS,
    Answers,
    Heldout,
    Identity,
    answer_heldout,
    capture_overhead,
    compare,
    tokens_per_second,
)
from draftloop.cli.outcome import resume_command, write_outcome
from draftloop.cli.progress import ProgressMeter
from draftloop.cli.run_folder import RunFolder
from draftloop.core.config import Config
from draftloop.core.errors import DraftloopError
from draftloop.core.events import EventLog
from draftloop.core.summary import CaptureOverhead, RunStatus
from draftloop.drafters.checkpoint import verify_checkpoint
from draftloop.drafters.target import target_identity
from draftloop.fleet.ray_errors import plain_error
from draftloop.fleet.worker import WorkerActor
from draftloop.generator.actor import GeneratorActor
from draftloop.generator.prompts import Prompt, chat_tokens, check_lengths, load_prompts, split
from draftloop.generator.results import TrafficStats
from draftloop.refresher.loop import Refresher
from draftloop.refresher.metrics import Exporter, TrafficTotals, WorkerFigures
from draftloop.sglang.server import free_port
from draftloop.sglang.target import resolve_target
from draftloop.trainer.day0 import make_untrained
from draftloop.trainer.trainer import TrainerActor

# Even a very short run gets a look at the loop.
SHORTEST_REFRESH_S = 20.0
REPORT_S = 15.0


@dataclass
class Prepared:
    """What stands before a server starts."""

    target: Path
    drafter: Path
    version: str
    traffic: list[Prompt]
    heldout: Heldout


@dataclass
class Results:
    """What was measured so far; None or empty where the run did not get to it."""

    answers: dict[str, Answers] = field(default_factory=dict)
    speed: dict[str, float] = field(default_factory=dict)
    overhead: CaptureOverhead = field(default_factory=CaptureOverhead)
    identity: Identity | None = None
    traffic: TrafficStats = field(default_factory=TrafficStats)
    versions: list[str] = field(default_factory=list)
    tokens_captured: int = 0
    records_dropped: int = 0
    train_steps: int = 0


def run_demo(config: Config, folder: RunFolder, resume: bool) -> Path:
    """Run the demo and return the report's path. Raises DraftloopError, or KeyboardInterrupt after a clean stop;
    the report and the summary are written in every case."""
    run = DemoRun(config, folder)
    status: RunStatus = "failed"
    prepared = run.prepare(resume)
    try:
        with run.exporter, LiveView(config.demo.minutes, prepared.target.name) as view, LocalRay() as cluster:
            run.view = view
            run.execute(prepared, cluster)
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        run.emit("interrupted", t_s=run.now())
        raise
    except Exception as error:
        if (plain := plain_error(error)) is None:
            run.emit("error", t_s=run.now(), message=repr(error))
            raise
        run.emit("error", t_s=run.now(), message=str(plain))
        if folder.journal.exists():
            raise DraftloopError(f"{plain}; nothing is lost, go on with: {resume_command(folder)}") from error
        raise plain from error
    finally:
        report = write_outcome(config, folder, prepared.target, status, run.now(), run.results)
        run.log.close()
    return report


class DemoRun:
    """One run: its clock, events, actors and results."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self.config = config
        self.folder = folder
        self.results = Results()
        self.log = EventLog(folder.events)
        self.view: LiveView | None = None
        self.exporter = Exporter(config.metrics)
        self._started = time.monotonic()
        self._phase = "preparing"

    def now(self) -> float:
        """Seconds since the run started."""
        return time.monotonic() - self._started

    def emit(self, kind: Any, **data: Any) -> None:
        self.log.emit(kind, **data)
        self.exporter.event(kind, data)
        if self.view is not None:
            self.view.event(kind, data)

    def enter(self, phase: str) -> None:
        self._phase = phase
        self.emit("phase", t_s=self.now(), phase=phase)

    def prepare(self, resume: bool) -> Prepared:
        """Find target, prompts and drafter; everything that can be wrong with the input shows here."""
        config = self.config
        target = resolve_target(config.target.path)
        tokenize = chat_tokens(target)
        prompts = load_prompts(config.traffic.prompts)
        most_new = max(config.traffic.max_new_tokens, config.demo.heldout_tokens)
        check_lengths(prompts, lambda messages: len(tokenize(messages)), config.target.context_length - most_new - 32)
        traffic, held_out = split(prompts, config.demo.heldout_prompts, config.seed)
        heldout = Heldout(
            tuple(tokenize(prompt.messages) for prompt in held_out), tuple(prompt.domain for prompt in held_out)
        )
        drafter = self.folder.newest_checkpoint() if resume else config.drafter.checkpoint
        if drafter is None:
            drafter = self.folder.checkpoints / "v0"
            streams = (tokenize(prompt.messages) for prompt in traffic)
            make_untrained(target, config.drafter, streams, drafter, "v0", config.seed)
        # All would be found later, but after Ray's start.
        load_redactor(config.privacy.redactor, config.privacy.redactor_options)
        version = verify_checkpoint(drafter, target_identity(target)).version
        free_port(config.server.host, config.server.port)
        self._started = time.monotonic()
        self.emit("run_started", t_s=0.0, target=target.name, drafter=version, heldout=len(held_out))
        return Prepared(target, drafter, version, traffic, heldout)

    def execute(self, prepared: Prepared, cluster: LocalRay) -> None:
        self.results.versions = [prepared.version]
        worker, url = self._serve(cluster, prepared, "speculative", prepared.drafter)
        start_s = self.now()
        trainer = cluster.start(
            TrainerActor, prepared.target, prepared.drafter, self.config, self.folder.root, stop="close"
        )
        began = self.now()
        self._measure("day0", url, prepared.heldout)
        measure_s = self.now() - began
        self.enter("measuring the cost of capture")
        batch = prepared.heldout.input_ids[:OVERHEAD_PROMPTS]
        self.results.overhead = capture_overhead(url, batch, self.config.demo.overhead_pairs)
        # Left over for the end: the final and the plain measurement, both shorter than day 0's (more than one token a
        # step, or a cheaper step), a plain server's start, and the report.
        reserve = 1.4 * measure_s + start_s + REPORT_S
        until = max(self.config.demo.minutes * 60 - reserve, self.now() + SHORTEST_REFRESH_S)
        self._refresh(cluster, prepared, worker, trainer, url, until)
        self._measure("final", url, prepared.heldout)
        if (speculation := ray.get(worker.speculation.remote())) is not None:
            self.emit("speculation", t_s=self.now(), **speculation)
        cluster.end(trainer, "close")
        cluster.end(worker, "stop")
        self._plain(cluster, prepared)

    def _serve(self, cluster: LocalRay, prepared: Prepared, name: str, drafter: Path | None) -> tuple[Any, str]:
        self.enter(f"starting the {name} server")
        worker = cluster.start(WorkerActor, prepared.target, self.config, self.folder.log(name), stop="stop")
        url: str = ray.get(worker.start.remote(drafter))
        self.emit("server_started", t_s=self.now(), url=url)
        return worker, url

    def _measure(self, what: str, url: str, heldout: Heldout) -> None:
        demo = self.config.demo
        self.enter(f"measuring {what}")
        answers = answer_heldout(url, heldout, demo.heldout_tokens, top_logprobs=what == "plain")
        prompts = heldout.input_ids[: demo.speed_prompts]
        self.results.speed[what] = tokens_per_second(url, prompts, demo.heldout_tokens)
        self._measured(what, answers)

    def _measured(self, what: str, answers: Answers) -> None:
        self.results.answers[what] = answers
        self.emit(
            "measured",
            t_s=self.now(),
            what=what,
            accept_length=answers.accept_length,
            by_domain=answers.by_domain,
            tokens_per_s=self.results.speed.get(what),
        )

    def _refresh(
        self, cluster: LocalRay, prepared: Prepared, worker: Any, trainer: Any, url: str, until: float
    ) -> None:
        generator = cluster.start(GeneratorActor, stop="stop")
        refresher = Refresher(
            worker, trainer, self.config, self.folder.checkpoints, prepared.version, self.emit, self.now
        )
        ray.get(generator.start.remote([url], prepared.traffic, self.config.traffic, self.config.seed))
        self.enter("refreshing")
        meter = ProgressMeter()
        pool = ThreadPoolExecutor(1, thread_name_prefix="draftloop-mid")
        mid: Future[Answers] | None = None
        try:
            while self.now() < until:
                refresher.turn()
                self._note(refresher, ray.get(generator.stats.remote()), meter)
                if refresher.state.swaps > 0 and mid is None:
                    # Between swaps, under load and while training goes on: in a thread of its own.
                    mid = pool.submit(answer_heldout, url, prepared.heldout, self.config.demo.heldout_tokens)
                if mid is not None and mid.done() and "mid" not in self.results.answers:
                    self._measured("mid", mid.result())
            refresher.try_gate()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self._note(refresher, self.results.traffic, meter)
        if mid is not None and "mid" not in self.results.answers:
            self._measured("mid", mid.result())
        self.results.traffic = ray.get(generator.stop.remote())
        self._note(refresher, self.results.traffic, meter)
        cluster.end(generator, None)

    def _note(self, refresher: Refresher, traffic: TrafficStats, meter: ProgressMeter) -> None:
        state = refresher.state
        self.results.traffic = traffic
        self.results.versions = list(state.versions)
        self.results.tokens_captured = state.captured.tokens
        self.results.records_dropped = state.captured.records_dropped
        self.results.train_steps = state.train_steps
        reading = meter.reading(self.now(), self._phase, traffic, state)
        self.emit("progress", **reading)
        worker = WorkerFigures("worker", state.serving, True, reading["tokens_per_s"], reading["accept_by_domain"])
        self.exporter.observe(state, TrafficTotals(traffic.ok, traffic.failed, traffic.completion_tokens), [worker])

    def _plain(self, cluster: LocalRay, prepared: Prepared) -> None:
        worker, url = self._serve(cluster, prepared, "plain", None)
        self._measure("plain", url, prepared.heldout)
        cluster.end(worker, "stop")
        answers = self.results.answers
        others = [answers[what].generations for what in ("day0", "mid", "final") if what in answers]
        self.results.identity = compare(answers["plain"].generations, others)
        self.enter("done")
