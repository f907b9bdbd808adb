"""The same weights on several runtimes of the gateway, side by side."""

import argparse
import asyncio
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import grpc
import lightgbm
import numpy as np
import treelite
import uvloop
import xgboost
from rich.console import Console
from tritonclient.grpc import InferInput, service_pb2
from tritonclient.utils import np_to_triton_dtype

from gateway.process_limits import processors
from loadtests.support import rounds
from loadtests.support.results import RATE, Line, Metric, Results
from loadtests.support.rounds import Report, Step
from loadtests.support.servers import Server, gateway, spending
from loadtests.support.triton import sentences

HERE = Path(__file__).parent
MODELS = {"add_sub": HERE / "models", "minilm": HERE.parent / "model_repository"}
PEER = "onnxruntime"
RUNTIMES = (PEER, "openvino")
TENSORFLOW = "tensorflow"
"""Not part of `make setup`; it has no encoder with the same weights."""
NO_TENSORFLOW = (
    "tensorflow is not measured: this Python lacks it (make test-tensorflow, then "
    ".venv/tensorflow/bin/python -m loadtests runtimes)"
)
SAVED_MODEL = """
import sys
import tensorflow.compat.v1 as tf

graph = tf.Graph()
with graph.as_default(), tf.Session(graph=graph) as session:
    first, second = (tf.placeholder(tf.float32, [None, 16], f"INPUT{place}") for place in (0, 1))
    tf.saved_model.simple_save(
        session,
        sys.argv[1],
        {"INPUT0": first, "INPUT1": second},
        {"OUTPUT0": first + second, "OUTPUT1": first - second},
    )
"""
"""A program, since TensorFlow takes half a gigabyte of the client's process."""
METHOD = "/inference.GRPCInferenceService/ModelInfer"
WARM_UP_SECS = 1.0

COLUMNS = 32
FOREST_ROWS = (1, 1024)
FOREST_CLIENTS = 32
FORESTS = {"xgboost": "xgboost.json", "lightgbm": "model.txt"}
"""Files by the library, which is the name of the model, too."""
FOREST_CONFIG = """
backend: "fil"
max_batch_size: 1024
input [{{ name: "input__0" data_type: TYPE_FP32 dims: [ {columns} ] }}]
output [{{ name: "output__0" data_type: TYPE_FP32 dims: [ 1 ] }}]
{batching}
"""
BATCHING = {"not batched": "", "batched": "dynamic_batching { }"}
ALONE_SECS = 3.0


def runtimes(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure the sum of 16 floats and an encoder over gRPC, on runtimes with the same weights.

    `minilm` gets sentences of mixed lengths, which are padded to a common length in batches.
    TensorFlow, if it is installed, has a SavedModel of the sum.
    With --forests: forests with dynamic batching and without, and their libraries alone.
    """
    parser.add_argument("--forests", action="store_true", help="measure the backend fil instead")
    parser.add_argument("--trees", type=rounds.positive, default=500, metavar="N", help="of each")
    parser.add_argument("--clients", type=rounds.positive_list, default=[1, 8, 32], metavar="N,N")
    parser.add_argument("--secs", type=float, default=4.0, metavar="N", help="of each measurement")
    rounds.add_flags(parser)
    rounds.run_test(parser, arguments, _runtimes)


def _runtimes(asked: argparse.Namespace, folder: Path, console: Console) -> Report:
    if asked.forests:
        return _forests(asked, folder, console)
    contenders = [gateway(_repository(folder / name, name), name) for name in RUNTIMES]
    sums = _steps(asked, "add_sub", [_floats()])
    encoder = _steps(asked, "minilm", [_sentence(ids) for ids in sentences(256)])
    steps = {name: [*sums, *encoder] for name in RUNTIMES}
    if measured := importlib.util.find_spec(TENSORFLOW) is not None:
        contenders.insert(1, gateway(_saved_model(folder / TENSORFLOW), TENSORFLOW))
        steps[TENSORFLOW] = sums
    results, report = rounds.compare_contenders(
        "The same weights", contenders, steps, asked, console
    )
    notes = list(_ratios(results)) if measured else [NO_TENSORFLOW]
    return replace(report, notes=notes)


def _steps(asked: argparse.Namespace, model: str, messages: Sequence[bytes]) -> list[Step]:
    return [
        (f"{model}, {clients} clients", partial(_measure, asked, model, messages, clients))
        for clients in asked.clients
    ]


def _ratios(results: Results) -> Iterator[str]:
    for metric, found in results.values.items():
        if TENSORFLOW in found and metric.figure == RATE:
            ratio = results.ratio(metric, TENSORFLOW, PEER)
            yield f"{metric}: tensorflow {ratio:.2f} of {PEER}"


def _saved_model(folder: Path) -> Path:
    """A repository with the sum of 16 floats as a SavedModel, on one thread as its peers."""
    version = folder / "add_sub" / "1"
    version.mkdir(parents=True)
    subprocess.run(
        [sys.executable, "-c", SAVED_MODEL, version / "model.savedmodel"],
        check=True,
        capture_output=True,
    )
    config = (MODELS["add_sub"] / "add_sub" / "config.pbtxt").read_text()
    config = config.replace('backend: "onnxruntime"', 'platform: "tensorflow_savedmodel"')
    config = config.replace("intra_op_thread_count", "TF_NUM_INTRA_THREADS")
    config += 'parameters { key: "TF_NUM_INTER_THREADS" value { string_value: "1" } }\n'
    (folder / "add_sub" / "config.pbtxt").write_text(config)
    return folder


def _repository(folder: Path, backend: str) -> Path:
    for name, source in MODELS.items():
        shutil.copytree(source / name, folder / name)
        config = folder / name / "config.pbtxt"
        text = config.read_text().replace('backend: "onnxruntime"', f'backend: "{backend}"')
        if "default_model_filename" not in text:
            text += '\ndefault_model_filename: "model.onnx"\n'
        config.write_text(text)
    return folder


def _floats() -> bytes:
    values = np.ones((1, 16), np.float32)
    return _request("add_sub", {"INPUT0": values, "INPUT1": values})


def _sentence(ids: Sequence[int]) -> bytes:
    row = np.array([ids], np.int64)
    inputs = {
        "input_ids": row,
        "attention_mask": np.ones_like(row),
        "token_type_ids": np.zeros_like(row),
    }
    return _request("minilm", inputs, "sentence_embedding")


def _request(model: str, arrays: Mapping[str, np.ndarray], *outputs: str) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, array in arrays.items():
        made = InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        made.set_data_from_numpy(array)
        request.inputs.append(made._get_tensor())  # noqa: SLF001 - the client has no other way
        request.raw_input_contents.append(array.tobytes())
    for name in outputs:
        request.outputs.add(name=name)
    return request.SerializeToString()


def _measure(
    asked: argparse.Namespace, model: str, messages: Sequence[bytes], clients: int, server: Server
) -> Mapping[Metric, float]:
    address = f"127.0.0.1:{server.ports.grpc}"
    uvloop.run(_ask(address, messages, clients, WARM_UP_SECS))
    with spending(server.pid) as spent:
        began = time.perf_counter()
        durations = uvloop.run(_ask(address, messages, clients, asked.secs))
        elapsed = time.perf_counter() - began
    line = Line(f"{model} gRPC", "infer", clients)
    return {
        **line.costs(len(durations) / elapsed, spent.secs / len(durations) * 1e6),
        line.lower("p50", "ms"): statistics.median(durations) * 1e3,
    }


async def _ask(address: str, messages: Sequence[bytes], clients: int, secs: float) -> list[float]:
    """The seconds of each request; each client sends its next one at once."""
    durations: list[float] = []
    end = time.perf_counter() + secs
    async with grpc.aio.insecure_channel(address) as channel:
        infer = channel.unary_unary(METHOD)

        async def repeat(first: int) -> None:
            at = first
            while (began := time.perf_counter()) < end:
                await infer(messages[at % len(messages)])
                durations.append(time.perf_counter() - began)
                at += clients

        await asyncio.gather(*map(repeat, range(clients)))
    return durations


def _forests(asked: argparse.Namespace, folder: Path, console: Console) -> Report:
    _train(folder, asked.trees)
    contenders = [
        gateway(_forest_repository(folder, name, batching), name)
        for name, batching in BATCHING.items()
    ]
    steps: list[Step] = []
    for model in FORESTS:
        steps += [
            (f"{model}, {rows} rows", partial(_execution, asked, model, rows))
            for rows in FOREST_ROWS
        ]
        message = [_rows(model, 1)]
        step = partial(_measure, asked, model, message, FOREST_CLIENTS)
        steps.append((f"{model}, {FOREST_CLIENTS} clients", step))
    title = f"Forests of {asked.trees} trees"
    results, report = rounds.compare_contenders(title, contenders, steps, asked, console)
    notes = [
        _beside_the_library(model, rows, results, folder)
        for model in FORESTS
        for rows in FOREST_ROWS
    ]
    return Report(report.table, report.lines, notes)


def _train(folder: Path, trees: int) -> None:
    """Write a classifier of each library."""
    random = np.random.default_rng(0)
    rows = random.random((4000, COLUMNS), dtype=np.float32)
    labels = (rows[:, 0] * rows[:, 1] + random.random(4000) * 0.3 > 0.4).astype(int)
    objective = {"objective": "binary:logistic", "max_depth": 6}
    matrix = xgboost.DMatrix(rows, labels)
    xgboost.train(objective, matrix, trees).save_model(folder / FORESTS["xgboost"])
    objective = {"objective": "binary", "num_leaves": 63, "verbose": -1}
    dataset = lightgbm.Dataset(rows, labels)
    lightgbm.train(objective, dataset, trees).save_model(folder / FORESTS["lightgbm"])


def _forest_repository(folder: Path, name: str, batching: str) -> Path:
    repository = folder / name.replace(" ", "-")
    for model, file in FORESTS.items():
        version = repository / model / "1"
        version.mkdir(parents=True)
        shutil.copy(folder / file, version)
        config = FOREST_CONFIG.format(columns=COLUMNS, batching=batching)
        (version.parent / "config.pbtxt").write_text(config)
    return repository


def _some_rows(rows: int) -> np.ndarray:
    return np.random.default_rng(1).random((rows, COLUMNS), dtype=np.float32)


def _rows(model: str, rows: int) -> bytes:
    return _request(model, {"input__0": _some_rows(rows)})


def _execution_metric(model: str, rows: int) -> Metric:
    return Line(f"{model} execution", "execution", rows, "row").lower("time", "us")


def _pause_metric(model: str, rows: int) -> Metric:
    return Line(f"{model} execution", "execution", rows, "row").other("pause", "us")


def _execution(
    asked: argparse.Namespace, model: str, rows: int, server: Server
) -> Mapping[Metric, float]:
    """The time of an execution with one client, by the server's statistics, and the pause after."""
    address, message = f"127.0.0.1:{server.ports.grpc}", [_rows(model, rows)]
    uvloop.run(_ask(address, message, 1, WARM_UP_SECS))
    before = _computed(server, model)
    with spending(server.pid) as spent:
        began = time.perf_counter()
        uvloop.run(_ask(address, message, 1, asked.secs))
        elapsed_us = 1e6 * (time.perf_counter() - began)
    count, computed_ns = np.subtract(_computed(server, model), before)
    execution_us = computed_ns / count / 1e3
    line = _execution_metric(model, rows).line
    return {
        **line.costs(count / elapsed_us * 1e6, spent.secs / count * 1e6),
        _execution_metric(model, rows): execution_us,
        _pause_metric(model, rows): elapsed_us / count - execution_us,
    }


def _computed(server: Server, model: str) -> tuple[int, int]:
    """The number of requests of a model, and the nanoseconds of their executions."""
    url = f"http://127.0.0.1:{server.ports.http}/v2/models/{model}/stats"
    with urlopen(url) as response:
        found = json.load(response)["model_stats"][0]["inference_stats"]
    parts = [found[f"compute_{part}"] for part in ("input", "infer", "output")]
    return parts[0]["count"], sum(part["ns"] for part in parts)


def _beside_the_library(model: str, rows: int, results: Results, folder: Path) -> str:
    """The execution, and calls with the same pauses: a core that slept computes slower."""
    batching = min(BATCHING, key=partial(results.median, _execution_metric(model, rows)))
    ours = results.median(_execution_metric(model, rows), batching)
    pause = results.median(_pause_metric(model, rows), batching) / 1e6
    alone, interpreter = _calls(model, folder, _some_rows(rows))
    paused, own, read = _call_us(alone, pause), _call_us(alone), _call_us(interpreter, pause)
    return (
        f"{model}, {rows} rows: execution {ours:,.0f} us; library alone with the same pauses "
        f"{paused:,.0f} us ({ours / paused:.2f}), without {own:,.0f} us; treelite's interpreter "
        f"{read:,.0f} us ({read / ours:.1f} times as long)"
    )


def _calls(model: str, folder: Path, rows: np.ndarray) -> tuple[Callable[[], object], ...]:
    """A prediction by the library, and one by treelite's interpreter, on all cores."""
    file, cores = str(folder / FORESTS[model]), processors()
    if model == "xgboost":
        booster = xgboost.Booster({"nthread": cores}, model_file=file)
        read = treelite.frontend.load_xgboost_model(file, format_choice="json")
        alone = partial(booster.inplace_predict, rows)
    else:
        alone = partial(lightgbm.Booster(model_file=file).predict, rows, num_threads=cores)
        read = treelite.frontend.load_lightgbm_model(file)
    return alone, partial(treelite.gtil.predict, read, rows, nthread=cores)


def _call_us(call: Callable[[], object], pause_secs: float = 0.0) -> float:
    """The mean of the calls, as the statistics of a server have it."""
    durations = []
    end = time.perf_counter() + ALONE_SECS
    while (began := time.perf_counter()) < end:
        call()
        durations.append(time.perf_counter() - began)
        time.sleep(pause_secs)
    return 1e6 * statistics.fmean(durations)
