"""One SGLang server and what belongs to it: its process, its tap's records, its hot swaps. A Ray actor."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from draftloop.capture.collector import Collector, CollectorCounts
from draftloop.capture.privacy import Redaction, load_redactor
from draftloop.capture.ring import RingOwner, new_ring_name
from draftloop.capture.transport import Delivery, Outbox, Receipt
from draftloop.core.config import CapturePolicy, Config
from draftloop.core.errors import DraftloopError, HookError, ServerError
from draftloop.core.manifest import Manifest
from draftloop.core.records import CaptureRecord
from draftloop.drafters.checkpoint import verify_checkpoint
from draftloop.drafters.device import serving_dtype, use_cuda
from draftloop.drafters.load.served import ServedCosts
from draftloop.drafters.target import target_identity
from draftloop.fleet.attached import UNNAMED_VERSION, drafter_of, load_folder_of, ring_of, server_behind
from draftloop.fleet.counters import DecodeCounters, StepTally, WorkerSample, tally_steps
from draftloop.fleet.stall import StallProbe
from draftloop.sglang.algorithms import Algorithm
from draftloop.sglang.client import ServerClient
from draftloop.sglang.load.settings import REPORT_FILE, read_report
from draftloop.sglang.server import (
    ServerProcess,
    Speculation,
    free_port,
    load_settings,
    server_command,
    server_environment,
)
from draftloop.sglang.swap import ServingSlot, SwapReport, end_forgotten_pause, swap
from draftloop.sglang.tap import TapSettings
from draftloop.trainer.ray_transport import make_transport

# Our own measurements and probes travel under this domain; they are never captured.
UNCAPTURED_DOMAIN = "heldout"
ALL_ADDRESSES = "0.0.0.0"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class WorkerSwap:
    """A finished swap. stall_ms, step_ms: longest gap between a streaming client's tokens less its median gap, and
    that median gap; None when the probe got no tokens."""

    report: SwapReport
    stall_ms: float | None
    step_ms: float | None


class Worker:
    """Start one server, with a drafter (and a tap) or for plain decoding, and stop it without a trace."""

    def __init__(self, target: Path, config: Config, log: Path) -> None:
        self._target = target
        self._config = config
        self._log = log
        self._server: ServerProcess | None = None
        self._client: ServerClient | None = None
        self._ring: RingOwner | None = None
        self._collector: Collector | None = None
        self._outbox: Outbox | None = None
        self._serving: Manifest | None = None
        self._load_folder: Path | None = None
        self._steps: dict[tuple[str, str], StepTally] = {}
        self._redaction = Redaction(load_redactor(config.privacy.redactor, config.privacy.redactor_options))

    def start(self, drafter: Path | None) -> str:
        """Start the server and return its URL when it answers. drafter: checkpoint folder, None for plain decoding.

        Raises ServerError or HookError in one line, ManifestError or CheckpointError when the drafter does not fit the
        target; nothing is left running then.
        """
        server = self._config.server
        port = free_port(server.host, server.port)
        speculation, tap, load = None, None, None
        if drafter is not None:
            self._serving = verify_checkpoint(drafter, target_identity(self._target))
            speculation = Speculation(drafter, self._serving.version, self._serving.kind)
            tap = self._open_tap(speculation.algorithm)
            load = load_settings(self._config, speculation, self.load_folder)
            # What an earlier server of this place said is not this one's.
            (self.load_folder / REPORT_FILE).unlink(missing_ok=True)
        command = server_command(self._target, self._config.target, server, port, speculation)
        # Every address is none that a router elsewhere could use.
        host = ray.util.get_node_ip_address() if server.host == ALL_ADDRESSES else server.host
        url = f"http://{host}:{port}"
        try:
            self._server = ServerProcess(command, server_environment(self._config, tap, load), url, self._log)
            self._server.wait_ready(server.start_timeout_s)
            self._client = ServerClient(url)
            self._confirm_tap()
        except BaseException:
            self.stop()
            raise
        return url

    def attach(self, url: str) -> str:
        """Take a server that something else started: read its tap, swap its drafter, leave its process alone.

        Raises ServerError when it was not started for this, ManifestError or CheckpointError when its drafter does
        not fit the target.
        """
        client = ServerClient(url)
        folder = drafter_of(client)
        self._serving = verify_checkpoint(folder, target_identity(self._target))
        process = server_behind(url)
        self._load_folder = load_folder_of(process)
        self._collector = Collector(ring_of(process), self._config.capture.buffer_mib * _MIB)
        self.set_capture(self._config.capture.policy)
        self._client = client
        if self._version() == UNNAMED_VERSION:
            body = {"new_version": self._serving.version, "abort_all_requests": False}
            client.post("/update_weight_version", body)
        return url

    def _version(self) -> str:
        """The drafter's version as the server says."""
        if self._client is None:
            raise ServerError("no server was started")
        version: str = self._client.get("/model_info")["weight_version"]
        return version

    def _open_tap(self, algorithm: Algorithm) -> TapSettings:
        capture = self._config.capture
        name = new_ring_name()
        self._ring = RingOwner.create(name, capture.ring_mib * _MIB)
        self._collector = Collector(name, capture.buffer_mib * _MIB)
        # Until the warm-up request is seen, everything is captured.
        self._collector.set_policy(CapturePolicy())
        return TapSettings(ring=name, algorithm=algorithm, top_logits=capture.top_logits)

    def set_capture(self, policy: CapturePolicy) -> None:
        """Change what is captured; holds from the server's next step on, also for running requests that it opts out.

        Raises ConfigError when the policy names too many tenants, ServerError when the server decodes plainly.
        """
        if self._collector is None:
            raise ServerError("this server decodes plainly; it has no tap")
        policy = policy.model_copy(update={"skip_domains": policy.skip_domains | {UNCAPTURED_DOMAIN}})
        self._collector.set_policy(policy)

    @property
    def load_folder(self) -> Path:
        """Where the server reports its speculation, and can be pinned to shapes (`draftloop.sglang.load.settings`)."""
        return self._load_folder or self._log.with_suffix(".load")

    def speculation(self) -> dict[str, Any] | None:
        """What the server last said about following its load (`draftloop.sglang.load.report`); None if it does not."""
        report = read_report(self.load_folder)
        return report if report is not None and report["served"]["follows"] else None

    def costs(self) -> ServedCosts | None:
        """What the server's own steps cost; None before it has served any."""
        report = read_report(self.load_folder)
        return None if report is None else ServedCosts.load(report["served"])

    def _confirm_tap(self) -> None:
        """SGLang sends itself a warm-up request; a hooked scheduler has captured it."""
        if self._ring is None or self._collector is None:
            return
        if self._ring.counters().written == 0:
            raise HookError(f"the tap saw nothing of the server's warm-up request: see {self._log}")
        self._collector.take(1)
        self.set_capture(self._config.capture.policy)

    def take(self, most: int) -> list[CaptureRecord]:
        """Up to `most` captured records, redacted, oldest first. Raises PrivacyError for a redactor that fails."""
        records = [] if self._collector is None else self._collector.take(most)
        tally_steps(self._steps, records)
        return self._redaction.let_out(records)

    def sample(self) -> WorkerSample:
        """How the server is and what it has counted. Never raises: a server that does not answer is `problem`."""
        if self._client is None:
            return WorkerSample(problem="no server was started")
        try:
            self._check_alive()
            version = self._version()
            # One for each data-parallel rank; none before the scheduler has published its first.
            loads = self._client.get("/v1/loads?include=core")["loads"]
        except (DraftloopError, KeyError, ValueError) as error:
            return WorkerSample(url=self._client.base_url, problem=str(error))
        # SGLang's managers/scheduler.py, _accumulate_decode_moment: steps, B, t, B^2, B*t, tokens, each summed.
        moments = [load["decode_moments"] for load in loads if load["decode_moments"] is not None]
        return WorkerSample(
            url=self._client.base_url,
            version=version,
            running=sum(load["num_running_reqs"] for load in loads),
            captured=self.counts(),
            steps=dict(self._steps),
            decode=DecodeCounters(sum(m[5] for m in moments), sum(m[4] for m in moments)),
        )

    def offer(self, most: int, receipt: Receipt | None) -> Delivery | None:
        """Up to `most` captured records for the trainer; the same ones again until their receipt comes."""
        if self._collector is None:
            return None
        if self._outbox is None:
            self._outbox = Outbox(make_transport(self._config.transport), "worker", self.take, self._lost)
        return self._outbox.offer(most, receipt)

    def _lost(self) -> int:
        lost = 0 if self._collector is None else self._collector.counts().records_dropped
        return lost + self._redaction.withheld

    def counts(self) -> CollectorCounts:
        """Raises ServerError when the server has died."""
        self._check_alive()
        return CollectorCounts() if self._collector is None else self._collector.counts()

    def swap(self, checkpoint: Path) -> WorkerSwap:
        """Put a checkpoint into the running server, under load. Raises as `draftloop.sglang.swap.swap` does."""
        self._check_alive()
        if self._client is None or self._serving is None:
            raise ServerError("this server decodes plainly; there is no drafter to swap")
        cuda = use_cuda(self._config.server.device)
        slot = ServingSlot(self._serving, serving_dtype(self._config.target.dtype, cuda), cuda)
        end_forgotten_pause(self._client)
        probe_id = f"{UNCAPTURED_DOMAIN}--{uuid.uuid4().hex}"
        with StallProbe(self._client.base_url, probe_id, self._config.target.context_length) as probe:
            report = swap(self._client, checkpoint, slot)
        self._serving = Manifest.load(checkpoint)
        return WorkerSwap(report, probe.stall_ms, probe.step_ms)

    def _check_alive(self) -> None:
        if self._server is not None and not self._server.alive:
            raise ServerError(f"the SGLang server died: {self._server.why_it_died()} (log: {self._log})")

    def stop(self) -> None:
        """End the server and release the ring. Safe to call twice."""
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.stop()
        if self._collector is not None:
            if self._server is None:  # it serves on without us, and nobody reads what it would capture
                self._collector.set_policy(CapturePolicy(sample_rate=0.0))
            self._collector.close()
        if self._ring is not None:
            self._ring.close()
        self._client = self._server = self._collector = self._ring = None


WorkerActor = ray.remote(Worker)
