"""Manifests of KServe have fields that it knows, and arguments that `sluice serve` knows."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gateway.cli import build_parser
from gateway.flags.serve import settings
from gateway.settings import Settings
from tests.deploy.manifests import WRITABLE, check
from tests.deploy.serve_options import unknown
from tests.serving import ROOT

MANIFESTS = sorted((ROOT / "deploy" / "kserve").glob("*.yaml"))
STOP_SECS = 30
"""Kubernetes' terminationGracePeriodSeconds, if a pod has none."""


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def runtime() -> dict[str, Any]:
    return documents(ROOT / "deploy" / "kserve" / "runtime.yaml")[0]


def container() -> dict[str, Any]:
    found: dict[str, Any] = runtime()["spec"]["containers"][0]
    return found


def served() -> Settings:
    """The settings of the container's arguments."""
    return settings(build_parser().parse_args(container()["args"]))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_each_document_has_only_fields_of_its_schema(path: Path) -> None:
    found = documents(path)
    assert found
    for each in found:
        check(each)


def test_a_misspelt_field_is_refused() -> None:
    wrong = runtime()
    wrong["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(jsonschema.ValidationError, match="readynessProbe"):
        check(wrong)


def test_each_argument_is_an_option_of_serve() -> None:
    command, *arguments = container()["args"]
    assert command == "serve"
    assert unknown(arguments) == []
    assert served().models.repositories == (Path("/mnt/models"),)


def test_ports_of_probes_metrics_and_the_predictor_are_those_of_the_server() -> None:
    found, spec, listening = container(), runtime()["spec"], served()
    ports = {listening.http.port, listening.grpc.port}
    probes = [found["readinessProbe"], found["livenessProbe"]]
    assert {probe["httpGet"]["port"] for probe in probes} == {listening.http.port}
    assert {each["containerPort"] for each in found["ports"]} <= ports
    assert spec["annotations"]["prometheus.kserve.io/port"] == str(listening.metrics.port)


def test_changes_are_answered_inside_the_pod_only() -> None:
    admin = served().admin
    assert admin is not None
    assert admin.address == "127.0.0.1"
    assert not served().http.changes
    assert not served().grpc.changes


def test_a_single_model_has_the_name_of_its_service() -> None:
    assert {"name": "MODEL_NAME", "value": "{{.Name}}"} in container()["env"]


def test_the_drain_ends_before_kubernetes_kills_the_container() -> None:
    assert served().exit_timeout_secs < STOP_SECS


def test_each_mounted_volume_exists() -> None:
    mounted = {each["name"] for each in container()["volumeMounts"]}
    assert mounted == {each["name"] for each in runtime()["spec"]["volumes"]}
    assert {each["mountPath"] for each in container()["volumeMounts"]} == WRITABLE
