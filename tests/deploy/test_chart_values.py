"""Values of the Helm chart: wrong ones are refused, and texts stay texts."""

from pathlib import Path

import pytest
import yaml

from tests.deploy import manifests
from tests.deploy.chart import CHART, run

WRONG = """
image: {tag: "a b"}
routers: 3
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
"""
REFUSALS = """
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
"""
SMALL = "name: a, autoscaling: {minReplicas: 3, maxReplicas: 2, hpa: {}}"


@pytest.mark.parametrize(
    ("values", "refusals"),
    [
        (WRONG, REFUSALS),
        ("models: [{name: a}, {name: a}]", "at '/models/1/name': 'a' is the name of another one"),
        (f"models: [{{{SMALL}}}]", "at '/models/0/autoscaling/minReplicas': got 3, want at most"),
        ("{ray: {enabled: true}, models: [{name: a}]}", "at '/models': maxItems: got 1, want 0"),
    ],
    ids=["schema", "twice", "range", "ray"],
)
def test_wrong_values_are_refused_with_their_path(
    tmp_path: Path, values: str, refusals: str
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(values)
    done = run("template", "prod", CHART, "--values", file)
    assert done.returncode != 0
    assert [each for each in refusals.strip().splitlines() if each not in done.stderr] == []


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
