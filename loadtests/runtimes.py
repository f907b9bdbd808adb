"""The same weights on several runtimes of the gateway, side by side."""

import argparse
import asyncio
import importlib.util
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import uvloop
from rich.console import Console
from tritonclient.grpc import InferInput, service_pb2
from tritonclient.utils import np_to_triton_dtype

from loadtests.support import rounds
from loadtests.support.rounds import Better, Metric, Report, Results, Step
from loadtests.support.servers import Server, gateway, spent_secs
from loadtests.support.triton import sentences

HERE = Path(__file__).parent
MODELS = {"add_sub": HERE / "models", "minilm": HERE.parent / "model_repository"}
PEER = "onnxruntime"
RUNTIMES = (PEER, "openvino")
TENSORFLOW = "tensorflow"
"""Not part of `make setup`; it has no encoder with the same weights."""
NO_TENSORFLOW = "tensorflow is not measured: it is not installed (pip install 'sluice[tensorflow]')"
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


def runtimes(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure the sum of 16 floats and an encoder over gRPC, on runtimes with the same weights.

    `minilm` gets sentences of mixed lengths, which are padded to a common length in batches.
    TensorFlow, if it is installed, has a SavedModel of the sum.
    """
    parser.add_argument("--clients", type=rounds.positive_list, default=[1, 8, 32], metavar="N,N")
    parser.add_argument("--secs", type=float, default=4.0, metavar="N", help="of each measurement")
    rounds.add_flags(parser)
    rounds.run_test(parser, arguments, _runtimes)


def _runtimes(asked: argparse.Namespace, folder: Path, console: Console) -> Report:
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
        if TENSORFLOW in found and metric.better is Better.HIGHER:
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
    before = sum(spent_secs(server).values())
    began = time.perf_counter()
    durations = uvloop.run(_ask(address, messages, clients, asked.secs))
    elapsed = time.perf_counter() - began
    spent = sum(spent_secs(server).values()) - before
    noun = "client"
    return {
        Metric(f"{model} infer/s", clients, "", Better.HIGHER, noun): len(durations) / elapsed,
        Metric(f"{model} p50", clients, "ms", Better.LOWER, noun): 1e3
        * statistics.median(durations),
        Metric(f"{model} processor time", clients, "us", Better.LOWER, noun): 1e6
        * spent
        / len(durations),
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
