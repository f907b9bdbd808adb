"""A running rollout of a real server whose candidate answers NaN is taken back by its guardrail."""

import json
import math
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.onnx_models import model, node, save, tensor
from tests.serving import WAIT_SECS, serving, wait_until

pytestmark = pytest.mark.own_models("rollouts of the server")
PLAN = {
    "steps": [{"weight": 50, "for": "1h"}, {"weight": 100, "for": "1h"}],
    "guardrails": {"nan": {}, "errors": {}},
}
CONFIG = """
backend: "onnxruntime"
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: 2 }
"""
MOST_REQUESTS = 2000


def write(repository: Path, name: str, version: int, operator: str) -> None:
    """Add a version that answers with the operator's result for x - 1."""
    one = [node("Constant", "", "one", value_float=1.0)]
    nodes = [*one, node("Sub", "x one", "less"), node(operator, "less", "y")]
    save(model(nodes, [tensor("x", (2,))], [tensor("y", (2,))]), repository / name / str(version))
    (repository / name / "config.pbtxt").write_text(CONFIG)


def ask(client: httpx.Client, name: str, path: str = "") -> tuple[str, list[float]]:
    """The version that answers for (0, 5), and its answer."""
    inputs = [{"name": "x", "shape": [2], "datatype": "FP32", "data": [0, 5]}]
    found = client.post(f"/models/{name}{path}/infer", json={"inputs": inputs})
    assert found.status_code == 200, found.text
    return found.json()["model_version"], found.json()["outputs"][0]["data"]


def test_a_candidate_that_answers_nan_is_rolled_back_while_stable_answers_numbers(
    tmp_path: Path,
) -> None:
    repository = tmp_path / "models"
    for name in ("m", "neighbour"):
        write(repository, name, 1, "Abs")
    (repository / "m" / "rollout.json").write_text(json.dumps(PLAN))
    flags = ("--model-control-mode=explicit", "--load-model=*", f"--state-directory={tmp_path}")
    with (
        serving(repository, *flags) as server,
        httpx.Client(base_url=f"{server.http}/v2", timeout=WAIT_SECS) as client,
    ):
        write(repository, "m", 2, "Sqrt")
        assert client.post("/repository/models/m/load", json={}).is_success
        url = "/models/m/rollout"
        answers: Counter[str] = Counter()
        while client.get(url).json()["state"] == "step":
            for _ in range(20):
                version, (first, second) = ask(client, "m")
                answers[version] += 1
                assert math.isnan(first) if version == "2" else (first, second) == (1, 4)
            assert answers.total() <= MOST_REQUESTS, client.get(url).text
        assert answers.keys() == {"1", "2"}
        found, history = client.get(url).json(), client.get(f"{url}/history").json()
        assert (found["state"], found["weight"]) == ("rolled_back", 0)
        assert history[-1]["by"] == "guardrail:nan"
        assert "nan: " in history[-1]["reason"]
        of_2 = "/models/m/versions/2/ready"
        wait_until(lambda: not client.get(of_2).is_success, "version 2 is unloaded")
        assert {ask(client, "m")[0] for _ in range(20)} == {"1"}
        assert ask(client, "m", "/versions/stable") == ("1", [1, 4])
        assert ask(client, "neighbour") == ("1", [1, 4])
        rows = client.post("/repository/index", json={}).json()
        reasons = {row["version"]: row.get("reason") for row in rows if row["name"] == "m"}
        assert reasons["2"] == "rolled back; its files have not changed since"
