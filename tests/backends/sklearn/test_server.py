"""Estimators through the gateway, and pickles that harm their own worker only."""

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc

from tests.backends.sklearn.conftest import FEATURES, ROWS, write_estimator
from tests.children import children_of, command
from tests.serving import WAIT_SECS, Serving, serving

pytestmark = pytest.mark.timeout(240)

BATCHED = """
backend: "sklearn"
max_batch_size: 8
input { name: "rows" data_type: TYPE_FP32 dims: 4 }
output { name: "predict" data_type: TYPE_INT64 dims: 1 }
output { name: "predict_proba" data_type: TYPE_FP32 dims: 3 }
dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 10000000 }
"""
COLUMNS = 'backend: "sklearn"\nmax_batch_size: 8\n' + "\n".join(
    f'input {{ name: "{name}" data_type: TYPE_FP64 dims: 1 }}' for name in FEATURES
)
LIMITED = """
backend: "sklearn"
parameters { key: "initialize_timeout_secs" value { string_value: "10" } }
"""
TRUSTING = """
backend: "sklearn"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP64 dims: 2 }
output { name: "transform" data_type: TYPE_FP64 dims: 2 }
parameters { key: "trusted_types" value { string_value: "own_type.Twice" } }
"""
OWN = """
class Twice:
    n_features_in_ = 2

    def transform(self, rows):
        return rows * 2
"""
FOR_EVER = "open({file!r}, 'w').close()\nwhile True: print('x' * 1000)"


class Run:
    """Its pickle runs a program when it is loaded."""

    def __init__(self, program: str) -> None:
        self._program = program

    def __reduce__(self) -> Any:
        return exec, (self._program,)


def write(repository: Path, name: str, made: Any, config: str = "", file: str = "") -> None:
    (repository / name / "1").mkdir(parents=True)
    write_estimator(made, repository / name / "1" / (file or "model.skops"))
    if config:
        (repository / name / "config.pbtxt").write_text(config)


def write_own(repository: Path, name: str) -> None:
    """A model of an own type, whose module is in its version folder."""
    (repository / name / "1").mkdir(parents=True)
    file = repository / name / "1" / "own_type.py"
    file.write_text(OWN)
    spec = importlib.util.spec_from_file_location("own_type", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["own_type"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    write_estimator(module.Twice(), repository / name / "1" / "model.skops")
    del sys.modules["own_type"]
    (repository / name / "config.pbtxt").write_text(TRUSTING)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that a program in a pickle makes at its start."""
    return tmp_path_factory.mktemp("programs") / "started"


@pytest.fixture(scope="module")
def repository(
    estimators: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory, started: Path
) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    write(folder, "alone", estimators["logistic"])
    for place in ("alone/1", "alone"):
        (folder / place / "quantile_forest.py").write_text("print('stood in')\n")
    write_own(folder, "own")
    write(folder, "forest", estimators["forest"], BATCHED)
    write(folder, "columns", estimators["columns"], COLUMNS)
    write(folder, "pickled", estimators["regressor"], file="model.joblib")
    write(folder, "exits", Run("import os; os._exit(3)"), file="model.pkl")
    write(folder, "raises", Run("raise OSError('no\\nluck')"), file="model.pkl")
    endless = Run(FOR_EVER.format(file=str(started)))
    write(folder, "endless", endless, LIMITED, file="model.pickle")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Serving]:
    with serving(
        repository,
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in ("alone", "columns", "forest", "own", "pickled")),
        "--backend-config=sklearn,allow-pickle=true",
    ) as found:
        yield found


@pytest.fixture(scope="module")
def http(server: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http, timeout=2 * WAIT_SECS) as found:
        yield found


def infer(http: httpx.Client, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    response = http.post(f"/v2/models/{model}/infer", json=body)
    assert response.status_code == 200, response.text
    return {each["name"]: each["data"] for each in response.json()["outputs"]}


def rows_of(values: Any, name: str = "X", datatype: str = "FP64") -> dict[str, Any]:
    found = np.asarray(values)
    return {
        "name": name,
        "datatype": datatype,
        "shape": list(found.shape),
        "data": found.ravel().tolist(),
    }


def test_a_folder_without_a_config_answers(
    http: httpx.Client, estimators: Mapping[str, Any]
) -> None:
    expected = estimators["logistic"]
    found = infer(http, "alone", {"inputs": [rows_of(ROWS[:3])]})
    assert found == {"predict": expected.predict(ROWS[:3]).tolist()}
    outputs = [{"name": "predict_proba"}, {"name": "decision_function"}]
    found = infer(http, "alone", {"inputs": [rows_of(ROWS[:1])], "outputs": outputs})
    assert found == {
        "predict_proba": expected.predict_proba(ROWS[:1]).ravel().tolist(),
        "decision_function": expected.decision_function(ROWS[:1]).ravel().tolist(),
    }


def test_requests_of_a_batch_get_their_own_rows(
    server: Serving, http: httpx.Client, estimators: Mapping[str, Any]
) -> None:
    rows = ROWS[:4].astype(np.float32)
    expected = estimators["forest"].predict_proba(rows).astype(np.float32)

    def ask(index: int) -> Any:
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            given = tritonclient.grpc.InferInput("rows", [1, 4], "FP32")
            given.set_data_from_numpy(rows[index : index + 1])
            wanted = [tritonclient.grpc.InferRequestedOutput("predict_proba")]
            return client.infer("forest", [given], outputs=wanted).as_numpy("predict_proba")

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(ask, range(4)))
    np.testing.assert_array_equal(np.concatenate(found), expected)
    (statistics,) = http.get("/v2/models/forest/stats").json()["model_stats"]
    assert [each["batch_size"] for each in statistics["batch_stats"]] == [4]


def test_columns_are_one_row_each(http: httpx.Client, estimators: Mapping[str, Any]) -> None:
    inputs = [rows_of(ROWS[:2, [i]], name) for i, name in enumerate(FEATURES)]
    found = infer(http, "columns", {"inputs": inputs[::-1]})
    assert found == {"predict": estimators["forest"].predict(ROWS[:2]).tolist()}


@pytest.mark.parametrize(
    ("values", "datatype", "text"),
    [
        (ROWS[:1, :3], "FP64", "unexpected shape for input 'X' for model 'alone'"),
        (np.zeros((1, 5)), "FP64", "unexpected shape for input 'X' for model 'alone'"),
        (np.zeros((1, 4), int), "INT64", "inference input 'X' data-type is 'INT64', but"),
        (np.array([["a"] * 4]), "BYTES", "inference input 'X' data-type is 'BYTES', but"),
    ],
)
def test_rows_of_another_width_or_type_are_refused(
    http: httpx.Client, values: Any, datatype: str, text: str
) -> None:
    body = {"inputs": [rows_of(values, datatype=datatype)]}
    response = http.post("/v2/models/alone/infer", json=body)
    assert response.status_code == 400
    assert text in response.json()["error"]


def mapped(process: int) -> str:
    return Path(f"/proc/{process}/maps").read_text()


def test_the_gateway_imports_nothing_of_scikit_learn(server: Serving) -> None:
    assert "sklearn" not in mapped(server.process.pid)


def test_a_worker_imports_nothing_of_torch(server: Serving) -> None:
    children = children_of(server.process.pid)
    workers = [mapped(pid) for pid in children if b"python/worker" in command(pid)]
    assert workers
    assert all("sklearn" in each for each in workers)
    assert not any("libtorch" in each for each in workers)


def test_an_own_type_is_found_in_the_models_folder(http: httpx.Client) -> None:
    found = infer(http, "own", {"inputs": [rows_of([[1.0, 2.0]], "x")]})
    assert found == {"transform": [2.0, 4.0]}


def test_a_module_of_a_folder_without_trust_is_not_imported(server: Serving) -> None:
    assert "stood in" not in server.text


def load_error(http: httpx.Client, model: str) -> str:
    response = http.post(f"/v2/repository/models/{model}/load", json={})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_a_pickle_with_permission_is_served(
    http: httpx.Client, estimators: Mapping[str, Any]
) -> None:
    found = infer(http, "pickled", {"inputs": [rows_of(ROWS[:2])]})
    assert found == {"predict": estimators["regressor"].predict(ROWS[:2]).tolist()}


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("exits", "model 'exits' failed: its worker process ended: it ended with status 3."),
        ("raises", "model 'raises': 'model.pkl' cannot be loaded: OSError: no"),
        ("endless", "in model 'endless' did not return within 10 s"),
    ],
)
def test_the_program_of_a_pickle_is_its_workers_affair(
    http: httpx.Client, started: Path, model: str, text: str
) -> None:
    error = load_error(http, model)
    assert text in error
    assert "\n" not in error.strip()
    assert os.path.exists(started) or model != "endless"
    assert infer(http, "alone", {"inputs": [rows_of(ROWS[:1])]})
    assert http.get("/v2/health/live").status_code == 200
