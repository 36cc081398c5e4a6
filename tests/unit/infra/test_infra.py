"""infra/: manifests fit KubeRay's schemas, configs fit draftloop's, and every metric that is asked for exists."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.runtime_env import RuntimeEnv

from draftloop.core.config import MetricsConfig, load_config
from draftloop.fleet.worker import ALL_ADDRESSES
from draftloop.refresher.metrics import Exporter

ROOT = Path(__file__).resolve().parents[3]
INFRA = ROOT / "infra"
SCHEMAS = json.loads((Path(__file__).parent / "kuberay_v1.json").read_text())
METRIC = re.compile(r"\bdraftloop_[a-z_]+\b")


def documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((INFRA / path).read_text()))


RAY_CLUSTER, RAY_JOB = documents("kuberay/raycluster.yaml")[0], documents("kuberay/rayjob.yaml")[0]
POLICY = next(document for document in documents("kuberay/config.yaml") if document["kind"] == "NetworkPolicy")
CONFIG = next(document for document in documents("kuberay/config.yaml") if document["kind"] == "ConfigMap")


def containers(cluster: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every container with its pod's spec."""
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        yield from ((container, pod) for container in pod["containers"])


@pytest.mark.parametrize("manifest", [RAY_CLUSTER, RAY_JOB], ids=lambda manifest: manifest["kind"])
def test_manifests_fit_the_custom_resource_definitions(manifest: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(SCHEMAS[manifest["kind"]]).validate(manifest)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [("workerGroupSpecs", "many"), ("headGroupSpec", {}), ("headGroupSpecs", {}), ("rayVersion", 2.6)],
)
def test_the_schema_refuses_what_the_operator_would(key: str, wrong: object) -> None:
    spec = {**RAY_CLUSTER["spec"], key: wrong}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMAS["RayCluster"]).validate({**RAY_CLUSTER, "spec": spec})


def test_the_job_selects_the_cluster() -> None:
    """What the operator checks beyond the schema: a name, and no retries of a job on a selected cluster."""
    assert RAY_JOB["spec"]["clusterSelector"] == {"ray.io/cluster": RAY_CLUSTER["metadata"]["name"]}
    assert not {"backoffLimit", "suspend", "shutdownAfterJobFinishes"} & RAY_JOB["spec"].keys()


def test_the_cluster_runs_the_locked_ray_and_mounts_what_it_names() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert f"ray=={RAY_CLUSTER['spec']['rayVersion']} " in lock
    claims = {document["metadata"]["name"] for document in documents("kuberay/config.yaml")}
    for container, pod in containers(RAY_CLUSTER):
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] == CONFIG["metadata"]["name"]
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_the_config_map_is_a_draftloop_config(tmp_path: Path) -> None:
    path = tmp_path / "draftloop.yaml"
    path.write_text(CONFIG["data"]["draftloop.yaml"])
    config = load_config(path)
    ports = {port["name"]: port["containerPort"] for container, _ in containers(RAY_CLUSTER)
             for port in container.get("ports", [])}  # fmt: skip
    assert config.metrics.port == ports["metrics"]
    mounted = {mount["mountPath"] for container, _ in containers(RAY_CLUSTER) for mount in container["volumeMounts"]}
    arguments = shlex.split(RAY_JOB["spec"]["entrypoint"])
    assert arguments[:2] == ["draftloop", "refresh"]
    paths = [*arguments[3::2], config.target.path]
    assert all(any(str(path).startswith(f"{mount}/") for mount in mounted) for path in paths)


def test_the_cluster_has_the_cards_and_addresses_that_the_fleet_needs(tmp_path: Path) -> None:
    path = tmp_path / "draftloop.yaml"
    path.write_text(CONFIG["data"]["draftloop.yaml"])
    config = load_config(path)
    (group,) = RAY_CLUSTER["spec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    cards = int(container["resources"]["limits"]["nvidia.com/gpu"])
    needs = [config.fleet.gpus_per_worker] * config.fleet.workers + [config.fleet.trainer_gpus]
    # An actor's cards lie in one pod; here each actor takes a whole pod.
    assert needs == [cards] * group["replicas"]
    assert config.server.host == ALL_ADDRESSES, "the router reaches the workers from another pod"
    head = next(container for container, _ in containers(RAY_CLUSTER) if container["name"] == "ray-head")
    ports = [port["containerPort"] for port in head["ports"]]
    assert {config.router.port, config.metrics.port} <= set(ports)
    assert (config.router.host, config.metrics.host) == (ALL_ADDRESSES, ALL_ADDRESSES)
    shared = next(volume for volume in group["template"]["spec"]["volumes"] if volume["name"] == "shm")
    assert int(shared["emptyDir"]["sizeLimit"].removesuffix("Gi")) << 10 > config.capture.ring_mib


@pytest.mark.parametrize("name", ["qwen3-8b-1xH200.yaml", "qwen3-8b-8xH200.yaml"])
def test_a_machines_config_uses_all_of_its_cards(name: str) -> None:
    config = load_config(INFRA / "configs" / name)
    fleet, cards = config.fleet, config.hardware.cards
    assert fleet.gpus_per_worker is not None
    assert fleet.trainer_gpus is not None
    assert fleet.workers * fleet.gpus_per_worker + fleet.trainer_gpus == cards
    assert (config.server.device, config.trainer.device) == ("cuda", "cuda")
    assert config.server.host == "127.0.0.1", "router and workers share the machine"


def test_ports_that_run_code_are_closed_to_others() -> None:
    """Without `ports` a rule opens all of them: only the cluster's own pods may have that."""
    label = POLICY["spec"]["podSelector"]["matchLabels"]
    assert all(label.items() <= pod["metadata"]["labels"].items() for pod in pods())
    for rule in POLICY["spec"]["ingress"]:
        if "ports" not in rule:
            assert rule["from"] == [{"podSelector": {"matchLabels": label}}]
        assert {"port": 6379} not in rule.get("ports", [])


def pods() -> list[dict[str, Any]]:
    spec = RAY_CLUSTER["spec"]
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def test_the_jobs_runtime_environment_is_rays() -> None:
    (environment,) = documents("jobs/runtime_env.yaml")
    assert RuntimeEnv(**environment).working_dir() == "."


# --- metrics: what is asked for exists


def names_in(text: str) -> set[str]:
    return set(METRIC.findall(text))


NAMES = Exporter(MetricsConfig()).names


def test_every_alert_asks_for_metrics_that_exist() -> None:
    (rules,) = documents("prometheus/alerts.yml")
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in alerts}) == len(alerts)
    for rule in alerts:
        assert rule["labels"]["severity"] in ("page", "warn")
        assert rule["annotations"]["summary"]
        assert balanced(rule["expr"])
        assert names_in(rule["expr"]) or 'up{job="draftloop"}' in rule["expr"]
        assert names_in(rule["expr"]) <= NAMES, rule["alert"]


def test_the_scrape_configuration_finds_its_rules_and_exporter() -> None:
    (config,) = documents("prometheus/prometheus.yml")
    assert all((INFRA / "prometheus" / name).is_file() for name in config["rule_files"])
    jobs = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    port = load_config(None, [f"metrics.port={jobs['draftloop'][0].split(':')[1]}"]).metrics
    assert jobs["draftloop"] == [f"{port.host}:{port.port}"]


def dashboard() -> dict[str, Any]:
    return dict(json.loads((INFRA / "grafana" / "draftloop.json").read_text()))


def test_every_panel_asks_for_metrics_that_exist() -> None:
    expressions = [(panel["title"], target["expr"]) for panel in dashboard()["panels"] for target in panel["targets"]]
    expressions += [(note["name"], note["expr"]) for note in dashboard()["annotations"]["list"]]
    for title, expression in expressions:
        assert balanced(expression), title
        assert names_in(expression), title
        assert names_in(expression) <= NAMES, title


def test_every_metric_is_shown_or_watched() -> None:
    """A family counts once, whichever of its samples is asked for."""
    asked = names_in((INFRA / "grafana" / "draftloop.json").read_text())
    asked |= names_in((INFRA / "prometheus" / "alerts.yml").read_text())
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in NAMES}
    assert families == {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}


def test_panels_neither_overlap_nor_share_an_id() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = []
    for grid in (panel["gridPos"] for panel in panels):
        columns, rows = range(grid["x"], grid["x"] + grid["w"]), range(grid["y"], grid["y"] + grid["h"])
        cells += [(x, y) for x in columns for y in rows]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def balanced(expression: str) -> bool:
    """Brackets close in order."""
    open_brackets: list[str] = []
    for character in re.sub(r'"[^"]*"', "", expression):
        if character in "([{":
            open_brackets.append({"(": ")", "[": "]", "{": "}"}[character])
        elif character in ")]}" and (not open_brackets or open_brackets.pop() != character):
            return False
    return not open_brackets


def test_the_unit_runs_a_command_that_exists_and_stops_it_as_ctrl_c_does() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(INFRA / "systemd" / "draftloop.service")
    service = unit["Service"]
    arguments = shlex.split(service["ExecStart"])
    assert arguments[0].startswith(service["WorkingDirectory"])
    assert arguments[1] == "refresh"
    assert service["KillSignal"] == "SIGINT"
    out = arguments[arguments.index("--out") + 1]
    assert any(out.startswith(path) for path in service["ReadWritePaths"].split())
    assert f"/var/lib/{service['StateDirectory']}" in service["ReadWritePaths"]
