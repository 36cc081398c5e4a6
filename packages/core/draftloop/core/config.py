"""The one config schema, `draftloop.yaml`, with dotted overrides and its resolved copy beside every run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftloop.core.errors import ConfigError

# What teaches a drafter at a row of logits: `drafters.objectives`.
Divergence = Literal["cross-entropy", "hard-cross-entropy", "forward-kl", "reverse-kl", "acceptance", "log-acceptance"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TargetConfig(_Section):
    """The model whose output must not change."""

    path: str = Field("smollm2", description="'smollm2' (embedded default) or an HF checkpoint folder")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: bfloat16 on a GPU (FlashInfer has no fp32), float32 on a CPU"
    )
    context_length: int = Field(1024, ge=64)


class DrafterConfig(_Section):
    """The drafter's kind and shape."""

    kind: Literal["eagle1", "eagle3", "dflash"] = "eagle3"
    checkpoint: Path | None = Field(None, description="start from this drafter instead of an untrained one")
    draft_vocab_size: int = Field(4096, ge=16, description="EAGLE-3: rows of its own head")
    num_layers: int = Field(2, ge=1, description="DFlash: layers of the drafter (the paper: 5)")
    block_size: int = Field(8, ge=2, description="DFlash: slots of a block, the known token included (the paper: 16)")
    layer_ids: tuple[int, ...] | None = Field(None, description="target layers (outputs); None = the paper's choice")
    intermediate_size: int | None = Field(None, description="MLP width; None = the target's")


class ServerConfig(_Section):
    """One SGLang worker."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    host: str = Field("127.0.0.1", description="0.0.0.0 where router and workers are on several machines")
    port: int | None = Field(None, ge=1, le=65535, description="None = any free port")
    num_steps: int = Field(3, ge=1)
    topk: int = Field(4, ge=1)
    num_draft_tokens: int = Field(8, ge=2)
    max_running_requests: int = Field(16, ge=1)
    max_total_tokens: int = Field(16384, ge=512)
    mem_fraction: float | None = Field(
        None, gt=0.0, lt=1.0, description="share of a GPU for weights and KV cache; None = SGLang's choice"
    )
    attention: Literal["flashinfer", "triton", "draftloop_flashinfer"] = Field(
        "flashinfer",
        description="of a GPU: SGLang's own (triton also runs fp32), or ours, which verifies trees without masking "
        "the prefix",
    )
    chunked_prefill_size: int = Field(512, ge=64)
    threads: int | None = Field(None, ge=1, description="CPU threads; None = all cores that the trainer leaves")
    start_timeout_s: float = 240.0


class SpeculationConfig(_Section):
    """Speculation that follows the load: `server`'s tree is the largest one."""

    follow_load: bool = Field(False, description="choose tree or plain decoding each step (EAGLE-3 on a CPU)")
    margin: float = Field(0.03, ge=0.0, description="gain in predicted tokens/s that another shape must promise")


class CapturePolicy(_Section):
    """Which requests are captured. May be replaced while the server serves; an opt-out wins over an opt-in."""

    sample_rate: float = Field(1.0, ge=0.0, le=1.0)
    tenants: frozenset[str] | None = Field(None, description="only these tenants (opt-in); None = every tenant")
    skip_tenants: frozenset[str] = Field(frozenset(), description="never these tenants (opt-out)")
    domains: frozenset[str] | None = Field(None, description="only these domains; None = every domain")
    skip_domains: frozenset[str] = Field(frozenset(), description="never these domains")
    max_bytes_per_s: int | None = Field(
        None, ge=1, description="average rate of captured bytes; whole records are left out to hold it; None = no limit"
    )


class CaptureConfig(CapturePolicy):
    """The tap and what keeps its records. The policy is the one the server starts with."""

    ring_mib: int = Field(64, ge=1, description="shared-memory ring between scheduler and collector")
    top_logits: int = Field(8, ge=0, le=64, description="the target's best tokens kept where a draft was refused")
    buffer_mib: int = Field(1024, ge=1)
    holdout_fraction: float = Field(0.1, gt=0.0, lt=0.5, description="records kept for the gate, never trained on")
    domain_quota: float = Field(0.7, gt=0.0, le=1.0, description="largest share of the buffer one domain may hold")
    replay_share: float = Field(0.5, ge=0.0, le=1.0, description="of what is trained on: records of earlier batches")

    @property
    def policy(self) -> CapturePolicy:
        """The policy alone."""
        return CapturePolicy(**self.model_dump(include=set(CapturePolicy.model_fields)))


class PrivacyConfig(_Section):
    """What is done to a record before it leaves its worker, and when it must go. Who is captured: see capture."""

    redactor: str | None = Field(
        None, description="'module:function', called with each record before it leaves a worker"
    )
    redactor_options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the redactor")
    retention_hours: float | None = Field(None, gt=0.0, description="records are erased when older; None = no limit")


class TransportConfig(_Section):
    """How records get from the workers to the trainer."""

    kind: Literal["ray", "mooncake"] = "ray"
    host: str = Field("127.0.0.1", description="Mooncake: the address that other machines reach this one by")
    protocol: Literal["tcp", "rdma"] = Field("tcp", description="Mooncake")
    device: str = Field("", description="Mooncake: RDMA devices, comma-separated; '' = all")


class TrainerConfig(_Section):
    """The objective and its optimiser."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    ttt_steps: int = Field(3, ge=1)
    ttt_decay: float = Field(0.8, gt=0.0, le=1.0)
    divergence: Divergence = Field("cross-entropy", description="EAGLE-3: what a row's loss is")
    refused_weight: float = Field(0.0, ge=0.0, description="how much drafts that serving refused are unlearned")
    guard_weight: float = Field(
        0.0, ge=0.0, description="how much records of earlier drafters hold the drafter to what the serving one says"
    )
    learning_rate: float = Field(1e-3, gt=0.0)
    warmup_steps: int = Field(20, ge=0)
    cosine_steps: int | None = Field(None, ge=1, description="the rate falls to 0 by then; None = constant")
    weight_decay: float = Field(0.0, ge=0.0)
    clip_norm: float = Field(0.5, gt=0.0)
    ema_decay: float = Field(0.98, ge=0.0, lt=1.0)
    batch_tokens: int = Field(256, ge=32, description="small steps learn most per second on a CPU")
    accumulate: int = Field(1, ge=1, description="batches to one optimiser step, in each process")
    processes: int = Field(1, ge=1, description="Ray actors that share each step and shard the optimiser's state")
    save_every_seconds: float = Field(300.0, gt=0.0, description="how much training a trainer that is killed may lose")
    packed: bool = Field(False, description="lay records one after another in rows of max_length, not padded")
    max_length: int = Field(1024, ge=32)
    threads: int = Field(1, ge=1)


class GateConfig(_Section):
    """When a candidate may replace the serving drafter."""

    every_seconds: float = Field(90.0, gt=0.0)
    min_records: int = Field(4, ge=1)
    min_gain: float = Field(0.01, description="what the lower bound of the gain in accepted length must exceed")
    confidence: float = Field(0.9, gt=0.5, lt=1.0, description="of that lower bound, one-sided")
    domain_floor: float = Field(0.05, ge=0.0, lt=1.0, description="largest share of its accepted length a domain loses")
    max_eval_tokens: int = Field(4096, ge=64)


class DriftConfig(_Section):
    """When the traffic counts as changed, and when training pauses."""

    false_alarm_every: int = Field(1000, ge=20, description="windows between false alarms of a detector, on average")
    window_steps: int = Field(64, ge=1, description="verification steps whose mean accepted length is one value")
    window_tokens: int = Field(256, ge=1, description="generated tokens whose out-of-vocabulary share is one value")
    window_requests: int = Field(64, ge=10, description="requests whose domain mix is compared with the first ones'")
    patience: int = Field(4, ge=1, description="candidates in a row under gate.min_gain before training pauses")
    rebuild_vocabulary: bool = Field(
        False, description="let EAGLE-3's draft vocabulary follow the traffic; the servers must take a changed map"
    )


class MetricsConfig(_Section):
    """The Prometheus exporter."""

    host: str = Field("127.0.0.1", description="loopback; another address lets others on the network read the metrics")
    port: int | None = Field(None, ge=1, le=65535, description="None = no exporter")


class TrafficConfig(_Section):
    """The online data generator."""

    prompts: Path | None = Field(None, description="JSONL or Parquet with `messages` or `prompt`; None = built in")
    concurrency: int = Field(8, ge=1)
    max_new_tokens: int = Field(160, ge=1)
    temperature: float = Field(0.0, ge=0.0)


class SimulateConfig(_Section):
    """`draftloop simulate`: the fleet it models.

    The defaults are estimates of an 8B target on cards of the H100's class: weights read at 2.7 TB/s, 800 TFLOP/s,
    1,000 tokens of context. The learning curve's `half` is of the order that public online systems report.
    """

    seconds: float = Field(600.0, ge=10.0, description="simulated time")
    clients_per_worker: int = Field(16, ge=1, description="requests in flight for each worker")
    batch: int = Field(32, ge=1, description="requests that a worker runs at once")
    answer_tokens: float = Field(800.0, gt=0.0)
    costs: Path | None = Field(
        None, description="a server's report (speculation.json in its folder of a run): measured, for the five below"
    )
    base_ms: float = Field(6.0, ge=0.0, description="a step: what it takes whatever the batch")
    request_ms: float = Field(0.05, ge=0.0, description="more for each request (its context)")
    node_ms: float = Field(0.02, ge=0.0, description="more for each verified token")
    level_ms: float = Field(0.6, ge=0.0, description="more for each draft level")
    draft_ms: float = Field(0.002, ge=0.0, description="more for each token that goes through a draft level")
    day0_accept_length: float = Field(2.0, ge=1.0)
    best_accept_length: float = Field(2.8, ge=1.0, description="what training tends to")
    half_tokens: float = Field(2.75e6, gt=0.0, description="trained tokens that bring half of the way there")
    trainers: int = Field(1, ge=0, description="devices that train instead of serving")
    trainer_tokens_per_s: float = Field(30e3, ge=0.0, description="of one of them")
    sample_rate: float = Field(1.0, ge=0.0, le=1.0)
    capture_bytes_per_token: float = Field(32768.0, ge=0.0, description="three fused layers and the last, H 4096, bf16")
    drafter_mib: float = Field(800.0, ge=0.0)
    gate_seconds: float = Field(30.0, gt=0.0)
    swap_stall_ms: float = Field(100.0, ge=0.0)
    swaps_at_once: int = Field(4, ge=1)


class FleetConfig(_Section):
    """SGLang workers as Ray actors, and the controller that keeps them."""

    workers: int = Field(1, ge=1, le=1000)
    cpus_per_worker: float = Field(0.0, ge=0.0, description="Ray CPUs reserved for a worker; 0 reserves none")
    gpus_per_worker: float | None = Field(None, ge=0.0, description="None = 1 when servers run on a GPU, else 0")
    trainer_gpus: float | None = Field(None, ge=0.0, description="None = 1 when the trainer runs on a GPU, else 0")
    health_timeout_s: float = Field(30.0, gt=0.0, description="a worker silent for so long is replaced")
    backoff_s: float = Field(2.0, gt=0.0, description="pause before a restart; doubles with each failure in a row")
    max_backoff_s: float = Field(60.0, gt=0.0)
    tick_s: float = Field(0.5, gt=0.0, description="the controller looks and acts this often")
    control_host: str = "127.0.0.1"
    control_port: int | None = Field(None, ge=1, le=65535, description="None = any free port")


class RouterConfig(_Section):
    """The sglang-router process in front of the workers."""

    host: str = "127.0.0.1"
    port: int | None = Field(30000, ge=1, le=65535, description="None = any free port")
    metrics_port: int | None = Field(29000, ge=1, le=65535, description="its Prometheus port; None = any free port")
    policy: Literal["cache_aware", "random", "round_robin", "power_of_two"] = "cache_aware"
    balance_abs_threshold: int = Field(
        4, ge=0, description="cache_aware: requests one worker may be ahead, so that a canary gets its share"
    )
    balance_rel_threshold: float = Field(1.2, ge=1.0)
    max_retries: int = Field(8, ge=0)
    request_timeout_s: int = Field(600, ge=1)


class RolloutConfig(_Section):
    """How a new drafter goes from one worker to all, and when it comes back."""

    max_at_once: int = Field(1, ge=1, description="workers that swap at the same time")
    min_steps: int = Field(300, ge=1, description="verify steps of either drafter before the canary is judged")
    max_canary_s: float = Field(900.0, gt=0.0, description="a canary with too little traffic by then is rolled back")
    max_accept_drop: float = Field(0.03, ge=0.0, le=1.0, description="share of the accepted length it may lose")
    max_speed_drop: float = Field(0.2, ge=0.0, le=1.0, description="share of a stream's tokens/s it may lose")
    max_stall_ms: float = Field(5000.0, gt=0.0, description="longest stall that a client may see at one swap")


class DemoConfig(_Section):
    """`draftloop demo`: how long, how much is measured."""

    minutes: float = Field(19.0, gt=0.0, description="wall-clock budget of the whole command, set-up aside")
    heldout_prompts: int = Field(32, ge=1)
    heldout_tokens: int = Field(64, ge=8)
    speed_prompts: int = Field(4, ge=1)
    overhead_pairs: int = Field(4, ge=1)


class HardwareConfig(_Section):
    """The GPUs a config is made for, so that it can be planned where there is none. None = what torch sees."""

    cards: int | None = Field(None, ge=1)
    card_gib: float | None = Field(None, gt=0.0)


class Config(_Section):
    """The whole of `draftloop.yaml`."""

    seed: int = 0
    target: TargetConfig = Field(default_factory=TargetConfig)
    drafter: DrafterConfig = Field(default_factory=DrafterConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    capture: CaptureConfig = Field(default_factory=CaptureConfig)
    privacy: PrivacyConfig = Field(default_factory=PrivacyConfig)
    transport: TransportConfig = Field(default_factory=TransportConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    gate: GateConfig = Field(default_factory=GateConfig)
    drift: DriftConfig = Field(default_factory=DriftConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    traffic: TrafficConfig = Field(default_factory=TrafficConfig)
    simulate: SimulateConfig = Field(default_factory=SimulateConfig)
    fleet: FleetConfig = Field(default_factory=FleetConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    demo: DemoConfig = Field(default_factory=DemoConfig)
    hardware: HardwareConfig = Field(default_factory=HardwareConfig)


def load_config(path: Path | None, overrides: Iterable[str] = ()) -> Config:
    """Read `path` (or the defaults) and apply `section.key=value` overrides.

    Values are parsed as YAML. Raises ConfigError in one line.
    """
    raw: Any = {}
    if path is not None:
        try:
            raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except OSError as err:
            raise ConfigError(f"cannot read config {path}: {err.strerror}") from None
        except yaml.YAMLError as err:
            raise ConfigError(f"{path} is not valid YAML: {' '.join(str(err).split())}") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{path} must hold a mapping of sections, not a {type(raw).__name__}")
    for override in overrides:
        _apply_override(raw, override)
    try:
        return Config.model_validate(raw)
    except ValidationError as err:
        first = err.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        raise ConfigError(f"config {where}: {first['msg']}") from None


def _apply_override(raw: dict[str, Any], override: str) -> None:
    dotted, eq, value = override.partition("=")
    if not eq or not dotted:
        raise ConfigError(f"override {override!r} must look like section.key=value")
    *sections, key = dotted.split(".")
    node = raw
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {section} is not a section")
        node = child
    try:
        node[key] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from None


def dump_config(config: Config) -> str:
    """The resolved config as YAML; `load_config` reads it back unchanged."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def save_config(config: Config, path: Path) -> None:
    """Write the resolved config to `path`."""
    path.write_text(dump_config(config), encoding="utf-8")
