"""The one config schema, `draftloop.yaml`, with dotted overrides and its resolved copy beside every run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftloop.core.errors import ConfigError


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

    kind: Literal["eagle3", "dflash"] = "eagle3"
    checkpoint: Path | None = Field(None, description="start from this drafter instead of an untrained one")
    draft_vocab_size: int = Field(4096, ge=16, description="EAGLE-3: rows of its own head")
    num_layers: int = Field(2, ge=1, description="DFlash: layers of the drafter (the paper: 5)")
    block_size: int = Field(8, ge=2, description="DFlash: slots of a block, the known token included (the paper: 16)")
    layer_ids: tuple[int, ...] | None = Field(None, description="target layers (outputs); None = the paper's choice")
    intermediate_size: int | None = Field(None, description="MLP width; None = the target's")


class ServerConfig(_Section):
    """One SGLang worker."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    host: str = "127.0.0.1"
    port: int | None = Field(None, ge=1, le=65535, description="None = any free port")
    num_steps: int = Field(3, ge=1)
    topk: int = Field(4, ge=1)
    num_draft_tokens: int = Field(8, ge=2)
    max_running_requests: int = Field(16, ge=1)
    max_total_tokens: int = Field(16384, ge=512)
    chunked_prefill_size: int = Field(512, ge=64)
    threads: int | None = Field(None, ge=1, description="CPU threads; None = all cores that the trainer leaves")
    start_timeout_s: float = 240.0


class CaptureConfig(_Section):
    """The tap and what keeps its records."""

    ring_mib: int = Field(64, ge=1, description="shared-memory ring between scheduler and collector")
    sample_rate: float = Field(1.0, ge=0.0, le=1.0)
    buffer_mib: int = Field(1024, ge=1)
    holdout_fraction: float = Field(0.1, gt=0.0, lt=0.5, description="records kept for the gate, never trained on")
    domain_quota: float = Field(0.7, gt=0.0, le=1.0, description="largest share of the buffer one domain may hold")


class TrainerConfig(_Section):
    """The objective and its optimiser."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    ttt_steps: int = Field(3, ge=1)
    ttt_decay: float = Field(0.8, gt=0.0, le=1.0)
    learning_rate: float = Field(1e-3, gt=0.0)
    warmup_steps: int = Field(20, ge=0)
    weight_decay: float = Field(0.0, ge=0.0)
    clip_norm: float = Field(0.5, gt=0.0)
    ema_decay: float = Field(0.98, ge=0.0, lt=1.0)
    batch_tokens: int = Field(256, ge=32, description="small steps learn most per second on a CPU")
    max_length: int = Field(1024, ge=32)
    threads: int = Field(1, ge=1)


class GateConfig(_Section):
    """When a candidate may replace the serving drafter."""

    every_seconds: float = Field(90.0, gt=0.0)
    min_records: int = Field(4, ge=1)
    min_gain: float = Field(0.01, description="smallest gain in expected accepted length")
    max_eval_tokens: int = Field(4096, ge=64)


class TrafficConfig(_Section):
    """The online data generator."""

    prompts: Path | None = Field(None, description="JSONL or Parquet with `messages` or `prompt`; None = built in")
    concurrency: int = Field(8, ge=1)
    max_new_tokens: int = Field(160, ge=1)
    temperature: float = Field(0.0, ge=0.0)


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


class Config(_Section):
    """The whole of `draftloop.yaml`."""

    seed: int = 0
    target: TargetConfig = Field(default_factory=TargetConfig)
    drafter: DrafterConfig = Field(default_factory=DrafterConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)
    capture: CaptureConfig = Field(default_factory=CaptureConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    gate: GateConfig = Field(default_factory=GateConfig)
    traffic: TrafficConfig = Field(default_factory=TrafficConfig)
    fleet: FleetConfig = Field(default_factory=FleetConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    demo: DemoConfig = Field(default_factory=DemoConfig)


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
