"""The Helm chart: each file of `ci/` is rendered once, and rules hold for all its documents."""

import json
import re
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import yaml

import gateway
from gateway.cli import build_parser
from gateway.flags.fleet import LEAST_SECRET_BYTES
from gateway.flags.serve import settings
from gateway.settings import Settings
from tests.deploy import manifests
from tests.deploy.chart import CHART, run
from tests.deploy.manifests import WRITABLE, Document, name, of_kind, ports, selected, templates
from tests.deploy.serve_options import unknown
from tests.serving import ROOT

NAMESPACE = "serving"
SECRET = "/etc/sluice/fleet/secret"
ZONE = "eu-west-1a"
METRIC = re.compile(r"\b(?:nv|gateway)_\w+")
SERIES = re.compile(r"\b(?:nv|gateway)_\w+\{([^}]*)\}")
TAGGED = re.compile(r"[\w./-]+:[\w.-]+")
LEAVING_SECS, SPARE_SECS = 5, 10
LONGEST_NAME = 63 - len("-12345")
"""The pods of a StatefulSet have its name and a number."""

VALUES = sorted(path.stem.removesuffix("-values") for path in (CHART / "ci").glob("*-values.yaml"))
by_values = pytest.mark.parametrize("values", VALUES)


@cache
def rendered(values: str) -> list[Document]:
    """The documents of a file of values."""
    file = CHART / "ci" / f"{values}-values.yaml"
    done = run("template", "prod", CHART, "--namespace", NAMESPACE, "--values", file)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each is not None]


def servers(values: str) -> Iterator[tuple[Document, Document]]:
    """Each template and container that starts `sluice`."""
    for template in templates(rendered(values)):
        for each in template["spec"]["containers"]:
            if "args" in each:
                yield template, each


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("s" * LEAST_SECRET_BYTES)
    return file


def served(container: Document, secret: Path) -> Settings:
    """The settings of a container's arguments."""
    arguments = [each.replace(SECRET, str(secret)) for each in container["args"]]
    for each in container["env"]:
        if each["name"] == "SLUICE_ZONE":
            arguments = [given.replace("$(SLUICE_ZONE)", ZONE) for given in arguments]
    # `--fleet=ray` has no effect on the ports and the drain.
    arguments = [each for each in arguments if each != "--fleet=ray"]
    if arguments[0] == "serve" and not any(each.startswith("--fleet=") for each in arguments):
        arguments.append("--fleet=static:localhost:1")
    return settings(build_parser().parse_args(arguments))


def test_the_chart_has_the_version_of_the_package() -> None:
    found = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert found["appVersion"] == found["version"] == gateway.__version__


def test_lint_has_no_complaint() -> None:
    done = run("lint", "--strict", CHART, "--values", CHART / "ci" / "everything-values.yaml")
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout


@by_values
def test_each_document_has_only_fields_of_its_schema(values: str) -> None:
    for each in rendered(values):
        manifests.check(each)


def test_a_misspelt_field_is_refused_also_in_a_template_of_another_kind() -> None:
    (cluster,) = of_kind(rendered("ray"), "RayCluster")
    wrong = json.loads(json.dumps(cluster))
    container = wrong["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    container["lifecycle"]["preStop"]["sleeep"] = {}
    with pytest.raises(jsonschema.ValidationError, match="sleeep"):
        manifests.check(wrong)
    with pytest.raises(AssertionError, match="no schema of x/v1 Unknown"):
        manifests.check({"apiVersion": "x/v1", "kind": "Unknown"})


@by_values
def test_each_name_is_short_and_stands_once(values: str) -> None:
    found = Counter((each["kind"], name(each)) for each in rendered(values))
    assert max(found.values()) == 1
    assert max(len(each) for _, each in found) <= LONGEST_NAME


@by_values
def test_each_selector_matches_pods(values: str) -> None:
    documents = rendered(values)
    workloads = of_kind(documents, *manifests.WORKLOADS)
    for each in workloads:
        (template,) = selected(documents, each["spec"]["selector"]["matchLabels"])
        assert template == each["spec"]["template"]
        for spread in template["spec"]["topologySpreadConstraints"]:
            assert selected(documents, spread["labelSelector"]["matchLabels"]) == [template]
    wanted = [each["spec"]["podSelector"] for each in of_kind(documents, "NetworkPolicy")]
    wanted += [each["spec"]["selector"] for each in of_kind(documents, "PodDisruptionBudget")] + [
        each["spec"]["selector"] for each in of_kind(documents, "InferencePool")
    ]
    labels = [each["matchLabels"] for each in wanted]
    labels += [each["spec"]["selector"] for each in of_kind(documents, "Service")]
    for each in labels:
        is_of_no_model = values == "routers" and each["app.kubernetes.io/component"] == "replica"
        assert is_of_no_model or selected(documents, each), each


@by_values
def test_ports_of_probes_services_and_policies_are_those_of_the_server(
    values: str, secret: Path
) -> None:
    documents = rendered(values)
    for template, container in servers(values):
        listening = served(container, secret)
        found = ports(template)
        assert found["http"] == listening.http.port
        assert found["metrics"] == listening.metrics.port
        assert listening.admin is not None
        assert listening.admin.port not in found.values()
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] == "http"
    for each in manifests.containers(documents):
        named = {port["name"] for port in each["ports"]}
        probes = [each[key] for key in each if key.endswith("Probe")]
        actions = [probe.get("httpGet") or probe["tcpSocket"] for probe in probes]
        assert {action["port"] for action in actions} <= named
    for each in of_kind(documents, "Service"):
        for template in selected(documents, each["spec"]["selector"]):
            for port in each["spec"]["ports"]:
                assert manifests.targets(template, port["targetPort"]) == {port["port"]}
    for each in of_kind(documents, "NetworkPolicy"):
        for template in selected(documents, each["spec"]["podSelector"]["matchLabels"]):
            rules = each["spec"]["ingress"]
            for port in (port["port"] for rule in rules for port in rule.get("ports", ())):
                assert len(manifests.targets(template, port)) == 1


@by_values
def test_the_port_of_the_fleet_is_open_to_routers_only(values: str) -> None:
    documents = rendered(values)
    for each in of_kind(documents, "NetworkPolicy"):
        for rule in each["spec"]["ingress"]:
            if {"port": "fleet"} in rule.get("ports", ()):
                (peer,) = rule["from"]
                found = selected(documents, peer["podSelector"]["matchLabels"])
                (router,) = of_kind(documents, "Deployment")
                assert found == [router["spec"]["template"]]


@by_values
def test_a_drain_ends_before_kubernetes_kills_the_pod(values: str, secret: Path) -> None:
    for template, container in servers(values):
        leaving = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        limit = LEAVING_SECS + served(container, secret).exit_timeout_secs + SPARE_SECS
        assert leaving == LEAVING_SECS
        assert template["spec"]["terminationGracePeriodSeconds"] == limit


@by_values
def test_routers_and_replicas_have_the_zone_of_their_node(values: str, secret: Path) -> None:
    label = {"fieldRef": {"fieldPath": "metadata.labels['topology.kubernetes.io/zone']"}}
    for _, container in servers(values):
        if container["args"][0] in ("serve", "replica"):
            assert {"name": "SLUICE_ZONE", "valueFrom": label} in container["env"]
            found = served(container, secret).fleet
            assert found is not None
            assert found.zone == ZONE


@by_values
def test_each_argument_is_an_option(values: str) -> None:
    for _, container in servers(values):
        command, *rest = container["args"]
        options = rest[1:] if command == "replica" else rest
        assert unknown(options, command) == []


@by_values
def test_routers_look_up_the_service_of_all_replicas(values: str, secret: Path) -> None:
    documents = rendered(values)
    for deployment in of_kind(documents, "Deployment"):
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        fleet = served(container, secret).fleet
        assert fleet is not None
        (service,) = [
            each for each in of_kind(documents, "Service") if each["spec"].get("clusterIP")
        ]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"]
        assert fleet.dns == (f"{name(service)}.{NAMESPACE}.svc", 8003)
        assert (fleet.address, fleet.port) == ("0.0.0.0", 8003)
        replicas = [each["spec"]["template"] for each in of_kind(documents, "StatefulSet")]
        assert selected(documents, service["spec"]["selector"]) == replicas
        for each in of_kind(documents, "StatefulSet"):
            assert each["spec"]["serviceName"] == name(service)
            (container,) = each["spec"]["template"]["spec"]["containers"]
            of_replica = served(container, secret).fleet
            assert of_replica is not None
            assert (of_replica.address, of_replica.port) == ("0.0.0.0", fleet.dns[1])
            assert (of_replica.name, of_replica.secret) == (fleet.name, fleet.secret)


def test_a_replica_hosts_the_model_of_its_entry() -> None:
    found = {each["args"][1] for _, each in servers("models") if each["args"][0] == "replica"}
    assert found == {"resnet", "llama-3.1-8b"}


@by_values
def test_each_image_has_a_tag(values: str) -> None:
    for each in manifests.containers(rendered(values)):
        assert TAGGED.fullmatch(each["image"])


@by_values
def test_each_mount_has_a_volume_and_writable_folders_are_mounted(values: str) -> None:
    for template in templates(rendered(values)):
        volumes = {each["name"] for each in template["spec"]["volumes"]}
        for each in template["spec"]["containers"]:
            mounts = {mount["mountPath"]: mount for mount in each["volumeMounts"]}
            assert {mount["name"] for mount in mounts.values()} <= volumes
            writable = {path for path, mount in mounts.items() if not mount.get("readOnly")}
            assert writable >= WRITABLE
            assert each["securityContext"]["readOnlyRootFilesystem"]


@by_values
def test_pods_have_no_rights(values: str) -> None:
    for template in templates(rendered(values)):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        is_head = template["metadata"]["labels"]["app.kubernetes.io/component"] == "ray-head"
        assert spec["automountServiceAccountToken"] is is_head
        for each in spec["containers"]:
            assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert not each["securityContext"]["allowPrivilegeEscalation"]


@by_values
def test_a_workload_is_scaled_by_one_thing(values: str) -> None:
    documents = rendered(values)
    scaled = Counter(
        each["spec"]["scaleTargetRef"]["name"]
        for each in of_kind(documents, "HorizontalPodAutoscaler", "ScaledObject")
    )
    assert set(scaled.values()) <= {1}
    assert scaled.keys() <= {name(each) for each in of_kind(documents, "StatefulSet")}
    for each in of_kind(documents, *manifests.WORKLOADS):
        assert ("replicas" in each["spec"]) is (name(each) not in scaled)


@by_values
def test_each_metrics_port_has_one_monitor(values: str) -> None:
    documents = rendered(values)
    monitors = of_kind(documents, "ServiceMonitor")
    for each in of_kind(documents, "Service") if monitors else ():
        labels = each["metadata"]["labels"].items()
        found = [
            one for one in monitors if one["spec"]["selector"]["matchLabels"].items() <= labels
        ]
        assert [one["spec"]["endpoints"][0]["port"] for one in found] == ["metrics"]
        assert "metrics" in {port["name"] for port in each["spec"]["ports"]}


@by_values
def test_each_metric_is_documented(values: str) -> None:
    documented = METRIC.findall((ROOT / "gateway/observability/README.md").read_text())
    kinds = ("PrometheusRule", "ConfigMap", "ScaledObject", "HorizontalPodAutoscaler")
    found = METRIC.findall(yaml.safe_dump(of_kind(rendered(values), *kinds), width=10_000))
    assert {each.removesuffix("_bucket") for each in found} <= set(documented)


@by_values
def test_models_are_scaled_by_series_of_replicas_and_from_zero_of_routers(
    values: str,
) -> None:
    wanted = {"service": "prod-sluice-replicas"}
    for each in of_kind(rendered(values), "HorizontalPodAutoscaler"):
        for metric in each["spec"]["metrics"]:
            selector = metric["external"]["metric"]["selector"]["matchLabels"]
            assert wanted.items() <= selector.items()
    for each in of_kind(rendered(values), "ScaledObject"):
        is_at_zero = not each["spec"]["minReplicaCount"]
        services = '=~"prod-sluice-(replicas|router)"' if is_at_zero else '="prod-sluice-replicas"'
        for trigger in each["spec"]["triggers"]:
            series = SERIES.findall(trigger["metadata"]["query"])
            assert series
            assert all(f"service{services}" in one for one in series)
            assert ("activationThreshold" in trigger["metadata"]) is is_at_zero


@pytest.mark.parametrize(("least", "budget"), [((1, 0), None), ((1, 1), 1), ((4, 2), 5)])
def test_the_budget_of_a_raycluster_is_one_pod_below_its_least_ones(
    least: tuple[int, int], budget: int | None
) -> None:
    values = [f"ray.groups[{place}].minReplicas={count}" for place, count in enumerate(least)]
    file = CHART / "ci" / "ray-values.yaml"
    done = run("template", "prod", CHART, "--values", file, "--set", ",".join(values))
    documents = [each for each in yaml.safe_load_all(done.stdout) if each is not None]
    found = [each["spec"]["minAvailable"] for each in of_kind(documents, "PodDisruptionBudget")]
    assert found == ([] if budget is None else [budget])


def test_the_dashboard_shows_each_panel_once() -> None:
    (board,) = of_kind(rendered("everything"), "ConfigMap")
    found = json.loads(board["data"]["sluice.json"])
    assert len({each["title"] for each in found["panels"]}) == len(found["panels"])
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"


@by_values
def test_a_secret_is_generated_unless_there_is_one(values: str) -> None:
    documents = rendered(values)
    mounted = {
        volume["secret"]["secretName"]
        for template in templates(documents)
        for volume in template["spec"]["volumes"]
        if volume["name"] == "fleet"
    }
    found = of_kind(documents, "Secret")
    if values == "everything":
        assert (mounted, found) == ({"fleet"}, [])
        return
    assert mounted == {name(found[0])}
    assert len(b64decode(found[0]["data"]["secret"])) >= LEAST_SECRET_BYTES


def test_an_update_needs_no_spare_node_without_surge() -> None:
    (spare,) = of_kind(rendered("models"), "Deployment")
    (none,) = of_kind(rendered("everything"), "Deployment")
    assert spare["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert none["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
