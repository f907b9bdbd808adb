"""Values of the Helm chart: wrong ones are refused, and texts stay texts."""

import json
from pathlib import Path

import pytest
import yaml

from tests.deploy import manifests, wheels
from tests.deploy.chart import CHART, run

WRONG = """
image: {repository: "sluice:cpu", tag: "a b"}
routers: 3
router:
  resources: {limits: {memory: 4GB, cpu: -1}, requests: {cpu: "-1"}}
  env: [{name: LEVEL, value: 1}, {name: TWICE, value: a, valueFrom: {}}]
modelVolume: {claimName: models}
exitTimeoutSeconds: "300"
models:
  - {name: Wrong_Name, replicas: -1}
  - {name: both, autoscaling: {minReplicas: 1, maxReplicas: 2, hpa: {}, keda: {serverAddress: "http://p"}}}
  - {name: fixed, replicas: 2, autoscaling: {minReplicas: 1, maxReplicas: 2, hpa: {}}}
  - {name: zero, autoscaling: {minReplicas: 0, maxReplicas: 2, hpa: {}}}
  - name: none
    autoscaling: {minReplicas: 0, maxReplicas: 2, metric: pending, keda: {serverAddress: "http://p"}}
  - {name: router, arguments: [--short]}
  - {name: all, model: "*", autoscaling: {minReplicas: 1, maxReplicas: 2, hpa: {}}}
  - {name: typo, replica: 2}
  - {name: unclaimed, volume: {persistentVolumeClaim: {claim: models}}}
"""
REFUSALS = """
at '/image/repository': 'sluice:cpu' does not match pattern
at '/router/resources/limits/memory': '4GB' does not match pattern
at '/router/resources/limits/cpu': minimum: got -1, want 0
at '/router/resources/requests/cpu': '-1' does not match pattern
at '/router/env/0/value': got number, want string
at '/router/env/1/value': maxLength: got 1, want 0
at '/modelVolume': additional properties 'claimName' not allowed
at '/image/tag': 'a b' does not match pattern
additional properties 'routers' not allowed
at '/exitTimeoutSeconds': got string, want integer
at '/models/0/name': 'Wrong_Name' does not match pattern
at '/models/0/replicas': minimum: got -1, want 0
at '/models/1/autoscaling': 'oneOf' failed, subschemas 0, 1 matched
at '/models/2/replicas': false schema
at '/models/3/autoscaling/minReplicas': minimum: got 0, want 1
at '/models/4/autoscaling/minReplicas': minimum: got 0, want 1
at '/models/5/name': 'not' failed
at '/models/5/arguments/0': '--short' does not match pattern
at '/models/6/autoscaling': false schema
at '/models/7': additional properties 'replica' not allowed
at '/models/8/volume/persistentVolumeClaim': missing property 'claimName'
"""
WRONG_RAY = """
fleet: {name: my fleet}
ray: {enabled: true, groups: [], redisAddress: redis}
models: [{name: a}]
"""
REFUSALS_OF_RAY = """
at '/fleet/name': 'my fleet' does not match pattern
at '/ray/groups': minItems: got 0, want 1
at '/ray/redisAddress': 'redis' does not match pattern
at '/models': maxItems: got 1, want 0
"""
SMALL = "name: a, autoscaling: {minReplicas: 3, maxReplicas: 2, hpa: {}}"
FEW = "name: few, replicas: 1, minReplicas: 1, maxReplicas: 2, resources: {}"
LESS = "name: less, replicas: 1, minReplicas: 3, maxReplicas: 2, resources: {}"
MORE = "name: more, replicas: 9, minReplicas: 1, maxReplicas: 2, resources: {}"


def groups(*given: str) -> str:
    """Values of a RayCluster with these groups."""
    listed = ", ".join(f"{{{each}}}" for each in given)
    return f"ray: {{enabled: true, groups: [{listed}]}}"


@pytest.mark.parametrize(
    ("values", "refusals"),
    [
        (WRONG, REFUSALS),
        ("models: [{name: a}, {name: a}]", "at '/models/1/name': 'a' is the name of another one"),
        (f"models: [{{{SMALL}}}]", "at '/models/0/autoscaling/minReplicas': got 3, want at most"),
        ("{ray: {enabled: true}, models: [{name: a}]}", "at '/models': maxItems: got 1, want 0"),
        (WRONG_RAY, REFUSALS_OF_RAY),
        (groups(FEW, FEW), "at '/ray/groups/1/name': 'few' is the name of another one"),
        (groups(LESS), "at '/ray/groups/0/minReplicas': got 3, want at most"),
        ("ray: {redisAddress: 'r:65536'}", "at '/ray/redisAddress': 'r:65536' does not match"),
        (groups(MORE), "at '/ray/groups/0/replicas': got 9, want at most"),
    ],
    ids=[
        "schema",
        "twice",
        "range",
        "ray",
        "ray-schema",
        "ray-twice",
        "ray-range",
        "port",
        "ray-most",
    ],
)
def test_wrong_values_are_refused_with_their_path(
    tmp_path: Path, values: str, refusals: str
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(values)
    done = run("template", "prod", CHART, "--values", file)
    assert done.returncode != 0
    assert [each for each in refusals.strip().splitlines() if each not in done.stderr] == []


@pytest.mark.parametrize(
    "values",
    [
        f"image: {{repository: 'h:5000/a/sluice@sha256', tag: {'0a' * 32}}}",
        *(
            f"router: {{resources: {{limits: {{cpu: {cpu}}}}}}}"
            for cpu in (
                "100u",
                "5n",
                "'.5'",
                ".5Gi",
                "2.",
                "'1e-3'",
                "1E+2",
                "2E",
                "0.5",
                "0",
                "+1",
            )
        ),
        "router: {env: [{name: A, value: '', valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]}",
        "ray: {redisAddress: 'redis:65535'}",
    ],
)
def test_what_kubernetes_accepts_is_accepted(tmp_path: Path, values: str) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(values)
    done = run("template", "prod", CHART, "--values", file)
    assert done.returncode == 0, done.stderr


def test_a_volume_may_have_each_source_that_kubernetes_knows() -> None:
    known = wheels.schema("_definitions.json")["$defs"]["io.k8s.api.core.v1.Volume"]["properties"]
    values = json.loads((CHART / "values.schema.json").read_text())
    assert {*values["$defs"]["volume"]["properties"], "name"} == set(known)


@pytest.mark.parametrize("values", ["everything", "ray"])
def test_names_that_are_numbers_stay_texts(values: str, tmp_path: Path) -> None:
    secret = tmp_path / "values.yaml"
    secret.write_text('fleet: {existingSecret: "80"}')
    file = CHART / "ci" / f"{values}-values.yaml"
    done = run("template", "123", CHART, "--values", file, "--values", secret)
    assert done.returncode == 0, done.stderr
    for each in yaml.safe_load_all(done.stdout):
        if each is not None:
            manifests.check(each)
