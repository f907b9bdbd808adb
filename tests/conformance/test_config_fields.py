"""Each field of config.pbtxt that `sluice check` calls honoured has its effect on a real model."""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
from google.protobuf.descriptor import Descriptor

from gateway.in_process.server import ModelHandle, Server
from gateway.models.supported_fields import SUPPORT, FieldVerdict
from gateway.protos import model_config_pb2
from tests.conformance.field_effects import (
    IDENTITY,
    ON_CPU,
    PYTHON,
    Files,
    T,
    World,
    X,
    ask,
    error,
    told,
    x,
)
from tests.forked_children import children_fork
from tests.onnx_models import identity, model, node, tensor
from tests.serving import ROOT, WAIT_SECS, wait_until

Effect = Callable[[World], None]
EFFECTS: dict[str, Effect] = {}
NEVER_US = 3_600_000_000
CORES = sorted(os.sched_getaffinity(0))
EXPIRES_SECS = 0.5
"""A request that waits twice as long for a gate has expired."""
NOTICED_SECS = 2.0
"""A response that is there is read sooner than that."""
DYNAMIC = "dynamic_batching { %s }\n"
SEQUENCE = "sequence_batching { %s }\n"
OLDEST = "oldest { max_candidate_sequences: %d %s }"
START = {"sequence_start": True}
END = {"sequence_end": True}
HELD = (-1,)
"""The input of a request that a gate holds."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A server with every option that a field of a config needs."""
    repository = tmp_path_factory.mktemp("fields") / "models"
    repository.mkdir()
    options = {
        "model_repository": repository,
        "model_control_mode": "explicit",
        "http_port": 0,
        "cache_config": {"local": {"size": 1 << 20}},
        "rate_limit": "execution_count",
        "rate_limit_resource": ["R:1", "P:1"],
        "host_policy": [f"one,cpu-cores={CORES[0]}-{CORES[0]}"],
        "metrics_config": {"histogram_latencies": True},
    }
    with children_fork(), Server(**options) as server:
        yield World(server, repository)


PLAYED_GPU = "tests/backends/onnxruntime/test_providers.py::"
ON_A_GPU = {
    "optimization.execution_accelerators.gpu_execution_accelerator.name": PLAYED_GPU
    + "test_an_instance_on_the_cpu_needs_no_accelerator_of_the_gpu",
    "optimization.execution_accelerators.gpu_execution_accelerator.parameters": PLAYED_GPU
    + "test_options_of_tensorrt_have_tritons_names",
}
"""The tests of fields without an effect on a CPU."""


def shows(*paths: str) -> Callable[[Effect], Effect]:
    """Say of which fields a function shows the effect."""

    def note(effect: Effect) -> Effect:
        EFFECTS.update(dict.fromkeys(paths, effect))
        return effect

    return note


def honoured() -> list[str]:
    """The paths of the schema's fields without fields of their own that these backends honour."""
    return [path for path in leaves(model_config_pb2.ModelConfig.DESCRIPTOR) if is_honoured(path)]


def leaves(message: Descriptor, above: str = "") -> Iterator[str]:
    for field in message.fields:
        path, below = above + field.name, field.message_type
        if below is not None and below.GetOptions().map_entry:
            below, path = below.fields_by_name["value"].message_type, f"{path}.value"
            path = path if below is not None else path.removesuffix(".value")
        if below is not None and below.fields:
            yield from leaves(below, f"{path}.")
        else:
            yield path


def is_honoured(path: str) -> bool:
    names = path.split(".")
    above = (".".join(names[:end]) for end in range(len(names), 0, -1))
    support = SUPPORT[next(each for each in above if each in SUPPORT)]
    return any(
        support.by(each).verdict is FieldVerdict.HONOURED for each in ("python", "onnxruntime")
    )


def test_every_honoured_field_has_a_test_of_its_effect() -> None:
    assert sorted(set(honoured()) - EFFECTS.keys() - ON_A_GPU.keys()) == []


def test_every_effect_is_that_of_an_honoured_field() -> None:
    assert sorted((EFFECTS.keys() | ON_A_GPU.keys()) - set(honoured())) == []


def test_what_has_an_effect_on_a_gpu_only_is_tested_where_that_is_played() -> None:
    for place in ON_A_GPU.values():
        file, name = place.split("::")
        assert f"def {name}(" in (ROOT / file).read_text()


def saved(made: onnx.ModelProto, name: str = "model.onnx") -> Files:
    return {f"1/{name}": made.SerializeToString()}


def echo(*dims: int | str) -> Files:
    return saved(model([node("Identity", "X", "Y")], [tensor("X", dims)], [tensor("Y", dims)]))


# What a model is.


@shows("name")
def _name(world: World) -> None:
    assert "other" in world.refused(IDENTITY + 'name: "other"')


@shows("platform", "backend", "default_model_filename")
def _platform(world: World) -> None:
    by_platform = world.load('platform: "onnxruntime_onnx"\n' + ON_CPU, echo(1))
    assert by_platform.metadata()["platform"] == "onnxruntime_onnx"
    assert "nothing" in world.refused('backend: "nothing"')
    named = 'backend: "onnxruntime" default_model_filename: "my.onnx"\n' + ON_CPU
    world.load(named, saved(identity(), "my.onnx"))
    assert "my.onnx" in world.refused(named, echo(1))


@shows("runtime")
def _runtime(world: World) -> None:
    assert "libtriton_x.so" in world.refused(IDENTITY + 'runtime: "libtriton_x.so"')


@shows(
    "version_policy.latest.num_versions", "version_policy.all", "version_policy.specific.versions"
)
def _versions(world: World) -> None:
    def served(policy: str) -> list[str]:
        config = IDENTITY + f"version_policy {{ {policy} }}"
        found: list[str] = world.load(config, versions=(1, 2, 3)).metadata()["versions"]
        return found

    assert served("latest { num_versions: 2 }") == ["2", "3"]
    assert served("all { }") == ["1", "2", "3"]
    assert served("specific { versions: [ 1, 3 ] }") == ["1", "3"]


@shows("max_batch_size")
def _max_batch_size(world: World) -> None:
    batching = world.load(IDENTITY + "max_batch_size: 2")
    assert batching.metadata()["inputs"][0]["shape"] == [-1, -1]
    assert "<= 2" in error(lambda: ask(batching, x(1, rows=3)).only())
    assert world.load(IDENTITY).metadata()["inputs"][0]["shape"] == [-1]


# Inputs and outputs.


@shows("input.name", "input.data_type", "input.dims", "input.optional")
def _inputs(world: World) -> None:
    extra = 'input { name: "A" data_type: TYPE_INT32 dims: [ 2 ] %s }\n'
    required = world.probe(inputs=X + extra % "", batch=0)
    assert "'A'" in error(lambda: ask(required, {"X": [1.0]}).only())
    good = {"X": [1.0], "A": np.ones(2, np.int32)}
    assert told(ask(required, good))["inputs"]["A"] == ["int32", [2], [1, 1]]
    wrong_type = {**good, "A": np.ones(2, np.float32)}
    assert "data-type" in error(lambda: ask(required, wrong_type).only())
    assert "shape" in error(lambda: ask(required, {**good, "A": np.ones(3, np.int32)}).only())
    optional = world.probe(inputs=X + extra % "optional: true", batch=0)
    assert list(told(ask(optional, {"X": [1.0]}))["inputs"]) == ["X"]


@shows("input.format")
def _format(world: World) -> None:
    config = IDENTITY.replace("dims: [ -1 ]", "dims: [ %s ] format: FORMAT_NHWC", 1)
    assert "3 dims" in world.refused(config % "-1")
    assert world.load(config % "2, 2, 3").config()["input"][0]["format"] == "FORMAT_NHWC"


@shows("input.reshape.shape", "output.reshape.shape")
def _reshape(world: World) -> None:
    output = 'output { name: "Y" data_type: TYPE_FP32 dims: [ %s ] %s }\n'
    given = 'input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] %s }\n'
    square = "reshape { shape: [ 2, 2 ] }"

    def asked(input_more: str, output_dims: str, output_more: str) -> tuple[object, object]:
        found = world.probe(
            inputs=given % input_more, outputs=T + output % (output_dims, output_more)
        )
        response = ask(found, {"X": np.ones((3, 4), np.float32)})
        answer = response.only()
        shown = told(ask(found, {"X": np.ones((3, 4), np.float32)}))["inputs"]["X"][1]
        return shown, answer.outputs["Y"].shape

    assert asked("", "4", "") == ([3, 4], (3, 4))
    assert asked(square, "4", square) == ([3, 2, 2], (3, 4))
    assert asked("", "2, 2", "reshape { shape: [ 4 ] }") == ([3, 4], (3, 2, 2))
    flat = world.load(
        'backend: "onnxruntime" max_batch_size: 4\n'
        + given % square
        + output % ("4", square)
        + ON_CPU,
        echo("batch", 2, 2),
    )
    assert ask(flat, {"X": np.ones((3, 4), np.float32)}).only().outputs["Y"].shape == (3, 4)


@shows("input.is_shape_tensor", "output.is_shape_tensor")
def _shape_tensors(world: World) -> None:
    for place in (1, 2):
        parts = IDENTITY.split("dims: [ -1 ]")
        parts[place] = " is_shape_tensor: true" + parts[place]
        assert "shape tensor" in world.refused("dims: [ -1 ]".join(parts))


@shows("input.allow_ragged_batch")
def _ragged(world: World) -> None:
    given = 'input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] %s }\n'
    counts = {}
    for more in ("", "allow_ragged_batch: true"):
        gate = world.gate()
        found = world.probe(DYNAMIC % "" + gate.config, inputs=given % more)
        first = ask(found, x(*HELD))
        gate.reached()
        others = [ask(found, x(*[1] * size)) for size in (1, 2)]
        gate.open()
        told(first)
        counts[more] = [told(each)["together"] for each in others]
    assert counts == {"": [1, 1], "allow_ragged_batch: true": [2, 2]}


@shows("output.name", "output.data_type", "output.dims")
def _outputs(world: World) -> None:
    onnx_config = (
        'backend: "onnxruntime"\n' + ON_CPU + 'output { name: "%s" data_type: %s dims: %s }\n'
    )
    assert world.load(onnx_config % ("Y", "TYPE_FP32", "1"), echo(1)).metadata()["outputs"] == [
        {"name": "Y", "datatype": "FP32", "shape": [1]}
    ]
    assert "Z" in world.refused(onnx_config % ("Z", "TYPE_FP32", "1"), echo(1))
    assert "INT32" in world.refused(onnx_config % ("Y", "TYPE_INT32", "1"), echo(1))
    assert "[2]" in world.refused(onnx_config % ("Y", "TYPE_FP32", "2"), echo(1))


@shows("output.label_filename")
def _labels(world: World) -> None:
    labelled = IDENTITY.rstrip().removesuffix("}") + 'label_filename: "labels.txt" }\n'

    def classes(config: str) -> list[str]:
        found = world.load(config, {"labels.txt": b"cat\ndog\n"})
        body = {
            "inputs": [{"name": "X", "datatype": "FP32", "shape": [2], "data": [1, 2]}],
            "outputs": [{"name": "Y", "parameters": {"classification": 2}}],
        }
        url = f"http://127.0.0.1:{world.server.ports['http']}/v2/models/{found.name}/infer"
        data: list[str] = httpx.post(url, json=body).json()["outputs"][0]["data"]
        return data

    assert classes(labelled) == ["2.000000:1:dog", "1.000000:0:cat"]
    assert classes(IDENTITY) == ["2.000000:1", "1.000000:0"]


@shows("model_repository_agents.agents.name", "model_repository_agents.agents.parameters")
def _agents(world: World) -> None:
    agent = (
        "model_repository_agents { agents { name: 'checksum' "
        "parameters { key: 'MD5:labels.txt' value: '%s' } } }"
    )
    text = b"cat\ndog\n"
    right = hashlib.md5(text).hexdigest()
    world.load(IDENTITY + agent % right, {"labels.txt": text})
    wrong = IDENTITY + agent % ("0" * len(right))
    assert "Mismatched MD5 hash" in error(lambda: world.load(wrong, {"labels.txt": text}))


RAGGED = """
backend: "onnxruntime" max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
output { name: "Y" data_type: TYPE_FP32 dims: [ %s ] }
"""
COUNTED = """
output { name: "N" data_type: TYPE_%s dims: [ 1 ] reshape { shape: [ ] } }
batch_input { kind: %s target_name: "%s" data_type: TYPE_%s source_input: "%s" }
"""


@shows(
    "batch_input.kind",
    "batch_input.target_name",
    "batch_input.data_type",
    "batch_input.source_input",
)
def _batch_input(world: World) -> None:
    def config(kind: str, datatype: str, target: str = "C", source: str = "X") -> str:
        both = f"preferred_batch_size: [ 2 ] max_queue_delay_microseconds: {NEVER_US}"
        counted = COUNTED % (datatype, kind, target, datatype, source)
        return RAGGED % "-1" + counted + SCATTER % "Y" + DYNAMIC % both + ON_CPU

    def counted(element: int) -> Files:
        nodes = [node("Identity", "X", "Y"), node("Identity", "C", "N")]
        inputs = [tensor("X", ["all"]), tensor("C", ["count"], element)]
        outputs = [tensor("Y", ["all"]), tensor("N", ["count"], element)]
        return saved(model(nodes, inputs, outputs))

    def told_by(kind: str, datatype: str, element: int) -> list[Any]:
        found = world.load(config(kind, datatype), counted(element))
        asked = [ask(found, x(1, 2, 3)), ask(found, x(1, 2))]
        return [each.only().outputs["N"].tolist() for each in asked]

    floats, integers = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
    assert told_by("BATCH_ELEMENT_COUNT", "FP32", floats) == [[[3]], [[2]]]
    assert told_by("BATCH_ELEMENT_COUNT", "INT32", integers) == [[[3]], [[2]]]
    assert told_by("BATCH_ACCUMULATED_ELEMENT_COUNT", "FP32", floats) == [[[3]], [[5]]]
    assert world.refused(config("BATCH_ELEMENT_COUNT", "FP32", target="D"), counted(floats))
    assert world.refused(config("BATCH_ELEMENT_COUNT", "FP32", source="Z"), counted(floats))


SCATTER = (
    'batch_output { target_name: "%s" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "X" }\n'
)


@shows("batch_output.target_name", "batch_output.kind", "batch_output.source_input")
def _batch_output(world: World) -> None:
    made = saved(model([node("Identity", "X", "Y")], [tensor("X", ["n"])], [tensor("Y", ["n"])]))
    scattered = world.load(RAGGED % "-1" + SCATTER % "Y" + ON_CPU, made)
    assert ask(scattered, x(1, 2, 3)).only().outputs["Y"].shape == (1, 3)
    assert world.refused(RAGGED % "-1" + SCATTER % "Z" + ON_CPU, made)
    wrong_source = (SCATTER % "Y").replace('"X"', '"Z"')
    assert world.refused(RAGGED % "-1" + wrong_source + ON_CPU, made)


# How it is run.


@shows("optimization.graph.level")
def _graph_level(world: World) -> None:
    config = 'backend: "onnxruntime" optimization { graph { level: %d } }\n' + ON_CPU
    assert "level" in world.refused(config % 7, echo(1))
    world.load(config % 1, echo(1))


ACCELERATED = """
backend: "onnxruntime"
optimization { execution_accelerators { %s_execution_accelerator { name: "%s" %s } } }
"""


@shows(
    "optimization.execution_accelerators.cpu_execution_accelerator.name",
    "optimization.execution_accelerators.cpu_execution_accelerator.parameters",
)
def _accelerators(world: World) -> None:
    assert "'warp'" in world.refused(ACCELERATED % ("cpu", "warp", "") + ON_CPU, echo(1))
    odd = 'parameters { key: "no_such_option" value: "1" }'
    assert world.refused(ACCELERATED % ("cpu", "openvino", odd) + ON_CPU, echo(1))


@shows("model_operations.op_library_filename")
def _op_library(world: World) -> None:
    config = 'backend: "onnxruntime" model_operations { op_library_filename: "my.so" }\n' + ON_CPU
    assert "my.so" in world.refused(config, echo(1))


@shows("instance_group.name", "instance_group.kind", "instance_group.count")
def _instances(world: World) -> None:
    found = told(ask(world.probe('instance_group { name: "g" kind: KIND_CPU }\n')))
    assert (found["name"], found["kind"]) == ("g_0", "CPU")
    group = "instance_group { kind: KIND_%s count: 2 }\n"
    gate = world.gate()
    several = world.probe(gate.config + group % "CPU")
    held = [ask(several, x(*HELD)) for _ in range(2)]
    gate.reached(2)
    gate.open()
    assert len({told(each)["name"] for each in held}) == 2
    assert told(ask(world.probe(group % "MODEL")))["kind"] == "MODEL"


@shows("instance_group.gpus", "instance_group.profile", "instance_group.passive")
def _groups(world: World) -> None:
    base = PYTHON + X + T
    assert "99" in world.refused(base + "instance_group { kind: KIND_GPU gpus: [ 99 ] }")
    assert "profile" in world.refused(base + 'instance_group { kind: KIND_CPU profile: "0" }')
    passive = world.probe("instance_group { kind: KIND_CPU passive: true }\n", batch=0)
    assert "passive" in error(lambda: ask(passive, {"X": [1.0]}).only())


@shows("instance_group.host_policy")
def _host_policy(world: World) -> None:
    group = 'instance_group { kind: KIND_CPU host_policy: "%s" }\n'
    assert told(ask(world.probe(group % "one")))["cores"] == CORES[:1]
    assert told(ask(world.probe(group % "other")))["cores"] == CORES
    assert "host_policy" in world.refused(IDENTITY + group % "one")


LIMITED = "instance_group { kind: KIND_CPU rate_limiter { %s } }\n"
RESOURCE = 'resources { name: "%s" global: %s count: %d } '


@shows(
    "instance_group.rate_limiter.resources.name",
    "instance_group.rate_limiter.resources.global",
    "instance_group.rate_limiter.resources.count",
)
def _resources(world: World) -> None:
    world.load(IDENTITY + LIMITED % (RESOURCE % ("R", "true", 1)))
    assert "R" in world.refused(IDENTITY + LIMITED % (RESOURCE % ("R", "true", 2)))
    assert "Q" in world.refused(IDENTITY + LIMITED % (RESOURCE % ("Q", "true", 1)))
    both = LIMITED % (RESOURCE % ("R", "true", 1)) + LIMITED % (RESOURCE % ("R", "false", 1))
    assert "R" in world.refused(IDENTITY + both)


@shows("instance_group.rate_limiter.priority")
def _rate_priority(world: World) -> None:
    """Two instances wait for what a third one holds: that of the better priority is next."""
    gate = world.gate()
    needs = RESOURCE % ("P", "true", 1)
    holder = world.probe(gate.config + LIMITED % needs)
    late, soon = (world.probe(LIMITED % f"{needs} priority: {each}") for each in (9, 1))
    for each in (late, soon):  # the priority weighs the executions so far
        told(ask(each))
    before = [queue_ns(each) for each in (late, soon)]
    held = ask(holder, x(*HELD))
    gate.reached()
    waiting = [ask(each, x(1)) for each in (late, soon)]
    gate.open()
    told(held)
    for response in waiting:
        response.only()
    late_ns, soon_ns = (queue_ns(each) for each in (late, soon))
    assert late_ns - before[0] > soon_ns - before[1]


def queue_ns(found: ModelHandle) -> int:
    """The time that the requests of a model have waited in all."""
    waited: int = found.statistics()["model_stats"][0]["inference_stats"]["queue"]["ns"]
    return waited


@shows("metric_tags")
def _metric_tags(world: World) -> None:
    found = world.load(IDENTITY + 'metric_tags { key: "team" value: "blue" }')
    ask(found, {"X": [1.0]}).only()
    lines = [line for line in world.server.metrics().splitlines() if f'"{found.name}"' in line]
    assert any('_team="blue"' in line for line in lines)


@shows("parameters.value.string_value")
def _parameters(world: World) -> None:
    text = 'parameters { key: "fail" value { string_value: "as told" } }'
    assert error(lambda: ask(world.load(IDENTITY + text), {"X": [1.0]}).only()) == "as told"


@shows("model_transaction_policy.decoupled")
def _decoupled(world: World) -> None:
    config = 'parameters { key: "responses" value { string_value: "3" } }\n' + IDENTITY
    policy = "model_transaction_policy { decoupled: true }"
    decoupled = world.load(config + policy)
    assert len(list(ask(decoupled, {"X": [1.0]}))) == 3
    body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1]}]}
    for found, status in ((decoupled, 501), (world.load(IDENTITY), 200)):
        url = f"http://127.0.0.1:{world.server.ports['http']}/v2/models/{found.name}/infer"
        assert httpx.post(url, json=body).status_code == status


@shows("response_cache.enable")
def _response_cache(world: World) -> None:
    for more, counts in (("", (1, 2)), ("response_cache { enable: true }", (1, 1))):
        found = world.probe(more + "\n")
        assert tuple(told(ask(found))["order"] for _ in range(2)) == counts


@shows(
    "model_metrics.metric_control.metric_identifier.family",
    "model_metrics.metric_control.histogram_options.buckets",
)
def _model_metrics(world: World) -> None:
    family = "nv_inference_first_response_histogram_ms"
    control = (
        f'model_metrics {{ metric_control {{ metric_identifier {{ family: "{family}" }} '
        "histogram_options { buckets: [ 7, 77 ] } } }\n"
    )
    policy = "model_transaction_policy { decoupled: true }\n"
    found = world.load(IDENTITY + policy + control)
    list(ask(found, {"X": [1.0]}))
    lines = [
        line
        for line in world.server.metrics().splitlines()
        if line.startswith(f"{family}_bucket") and f'"{found.name}"' in line
    ]
    assert ['le="7' in line or 'le="77' in line or 'le="+Inf' in line for line in lines] == [
        True
    ] * 3


WARMUP = """
model_warmup {
  name: "%s" batch_size: %d count: %d
  inputs { key: "X" value { data_type: TYPE_%s dims: [ %d ] %s } }
}
"""


@shows(
    "model_warmup.name",
    "model_warmup.batch_size",
    "model_warmup.count",
    "model_warmup.inputs.value.data_type",
    "model_warmup.inputs.value.dims",
    "model_warmup.inputs.value.zero_data",
    "model_warmup.inputs.value.random_data",
    "model_warmup.inputs.value.input_data_file",
)
def _warmup(world: World) -> None:
    def warmed(batch: int, count: int, data: str) -> list[list[object]]:
        config = WARMUP % ("w", batch, count, "FP32", 1, data) + ON_CPU
        found = world.load(
            PYTHON + "max_batch_size: 8\n" + X + T + config,
            {"warmup/four": np.float32(4).tobytes()},
        )
        return [each["X"] for each in told(ask(found))["warmed"]]

    assert warmed(1, 0, "zero_data: true") == [["float32", [1, 1], [0]]]
    assert len(warmed(1, 3, "zero_data: true")) == 3
    assert len(warmed(2, 0, "zero_data: true")) == 2
    assert warmed(1, 0, 'input_data_file: "four"') == [["float32", [1, 1], [4]]]
    ((_, _, (value,)),) = warmed(1, 0, "random_data: true")
    assert value != 0
    base = PYTHON + "max_batch_size: 8\n" + X + T + ON_CPU
    for datatype, dims in (("INT32", 1), ("FP32", 2)):
        assert "'X'" in world.refused(
            base + WARMUP % ("w", 1, 0, datatype, dims, "zero_data: true")
        )
    fails = 'parameters { key: "fail" value { string_value: "as told" } }\nmax_batch_size: 8\n'
    sample = WARMUP % ("my sample", 1, 0, "FP32", 1, "zero_data: true")
    assert "my sample" in world.refused(IDENTITY + fails + sample)


# Schedulers.


def queued(
    world: World, config: str, *asked: dict[str, Any], wait_secs: float = 0.0
) -> list[object]:
    """The answers of requests that waited together behind a held one, or their errors."""
    gate = world.gate()
    found = world.probe(config + gate.config)
    first = ask(found, x(*HELD))
    gate.reached()
    waiting = [ask(found, x(1), **fields) for fields in asked]
    time.sleep(wait_secs)
    gate.open()
    told(first)
    answers: list[object] = []
    for each in waiting:
        try:
            answers.append(told(each))
        except Exception as failure:  # noqa: BLE001 - the test looks at what it was
            answers.append(str(failure))
    return answers


def orders(answers: list[object]) -> list[int]:
    """The places of requests in the order of their executions."""
    found = [each["order"] for each in answers if isinstance(each, dict)]
    return [sorted(found).index(each) for each in found]


@shows("dynamic_batching.preferred_batch_size")
def _preferred(world: World) -> None:
    def together(more: str) -> list[int]:
        answers = queued(world, DYNAMIC % more, *[{}] * 4)
        return [each["together"] for each in answers if isinstance(each, dict)]

    assert together("") == [4] * 4
    assert together("preferred_batch_size: [ 2 ]") == [2] * 4


@shows("dynamic_batching.max_queue_delay_microseconds")
def _delay(world: World) -> None:
    assert told(ask(world.probe(DYNAMIC % "preferred_batch_size: [ 2 ]")))["together"] == 1
    more = f"preferred_batch_size: [ 2 ] max_queue_delay_microseconds: {NEVER_US}"
    patient = world.probe(DYNAMIC % more)
    assert [told(each)["together"] for each in [ask(patient), ask(patient)]] == [2, 2]


LATER = 'parameters { key: "later" value { string_value: "" } }\n'


def overtakes(world: World, config: str, *asked: dict[str, Any]) -> bool:
    """Whether a response overtakes that of the request before it, which a gate holds."""
    gate = world.gate()
    found = world.probe(config + gate.config + LATER)
    before, behind = asked
    held = ask(found, x(*HELD), **before)
    gate.reached()
    second = ask(found, x(1), **behind)
    wait_until(lambda: executions(found) > 0, "the second request has been executed")
    read = threading.Thread(target=second.only)
    read.start()
    read.join(NOTICED_SECS)
    overtaken = not read.is_alive()
    gate.open()
    told(held)
    read.join(WAIT_SECS)
    assert not read.is_alive()
    return overtaken


def executions(found: ModelHandle) -> int:
    """The number of executions of a model that have ended."""
    count: int = found.statistics()["model_stats"][0]["execution_count"]
    return count


@shows("dynamic_batching.preserve_ordering", "sequence_batching.oldest.preserve_ordering")
def _preserve(world: World) -> None:
    sequences = [{"correlation_id": each, **START} for each in (1, 2)]
    for scheduler, asked in (
        (DYNAMIC, [{}, {}]),
        (SEQUENCE % (OLDEST % (2, "%s")), sequences),
    ):
        assert overtakes(world, scheduler % "", *asked)
        assert not overtakes(world, scheduler % "preserve_ordering: true", *asked)


PRIORITIES = "priority_levels: 2 default_priority_level: %d "


@shows("dynamic_batching.priority_levels", "dynamic_batching.default_priority_level")
def _priorities(world: World) -> None:
    alone = "preferred_batch_size: [ 1 ] "
    asked = [{"priority": 2}, {"priority": 1}, {}]
    assert orders(queued(world, DYNAMIC % alone, *asked)) == [0, 1, 2]
    assert orders(queued(world, DYNAMIC % (alone + PRIORITIES % 2), *asked)) == [1, 0, 2]
    assert orders(queued(world, DYNAMIC % (alone + PRIORITIES % 1), *asked)) == [2, 0, 1]


def _policies(world: World, policy: str) -> None:
    """`policy` wraps what a queue policy says for the queue of all, or of one priority."""

    def outcome(text: str, *asked: dict[str, Any], wait_secs: float = 0.0) -> list[str]:
        config = DYNAMIC % (PRIORITIES % 1 + policy % text)
        answers = queued(world, config, *asked, wait_secs=wait_secs)
        return ["served" if isinstance(each, dict) else str(each).lower() for each in answers]

    timeout = f"default_timeout_microseconds: {int(EXPIRES_SECS * 1e6)} "
    assert outcome("", {}, wait_secs=2 * EXPIRES_SECS) == ["served"]
    assert "timeout" in outcome(timeout, {}, wait_secs=2 * EXPIRES_SECS)[0]
    delay = timeout + "timeout_action: DELAY"
    assert outcome(delay, {}, wait_secs=2 * EXPIRES_SECS) == ["served"]
    never = f"default_timeout_microseconds: {NEVER_US} "
    assert outcome(never, {"timeout": 1}) == ["served"]
    assert "timeout" in outcome(never + "allow_timeout_override: true", {"timeout": 1})[0]
    served, full = outcome("max_queue_size: 1", {}, {})
    assert (served, "queue" in full) == ("served", True)


@shows(
    "dynamic_batching.default_queue_policy.timeout_action",
    "dynamic_batching.default_queue_policy.default_timeout_microseconds",
    "dynamic_batching.default_queue_policy.allow_timeout_override",
    "dynamic_batching.default_queue_policy.max_queue_size",
)
def _default_policy(world: World) -> None:
    _policies(world, "default_queue_policy { %s }")


@shows(
    "dynamic_batching.priority_queue_policy.value.timeout_action",
    "dynamic_batching.priority_queue_policy.value.default_timeout_microseconds",
    "dynamic_batching.priority_queue_policy.value.allow_timeout_override",
    "dynamic_batching.priority_queue_policy.value.max_queue_size",
)
def _priority_policy(world: World) -> None:
    _policies(world, "priority_queue_policy { key: 1 value { %s } }")


@shows(
    "sequence_batching.direct.max_queue_delay_microseconds",
    "sequence_batching.direct.minimum_slot_utilization",
)
def _direct(world: World) -> None:
    direct = "direct { max_queue_delay_microseconds: %d minimum_slot_utilization: %g }"

    def alone(delay_us: int, utilization: float) -> None:
        found = world.probe(SEQUENCE % (direct % (delay_us, utilization)), batch=2)
        told(ask(found, correlation_id=1, **START))

    alone(0, 1)
    alone(NEVER_US, 0.1)
    found = world.probe(SEQUENCE % (direct % (NEVER_US, 1)), batch=2)
    both = [ask(found, correlation_id=each, **START) for each in (1, 2)]
    assert len({told(each)["order"] for each in both}) == 1


@shows(
    "sequence_batching.oldest.max_candidate_sequences",
    "sequence_batching.oldest.preferred_batch_size",
    "sequence_batching.oldest.max_queue_delay_microseconds",
)
def _oldest(world: World) -> None:
    found = world.probe(SEQUENCE % (OLDEST % (2, "")))
    told(ask(found, correlation_id=1, **START))
    other = told(ask(found, correlation_id=2, **START))["order"]
    assert other < told(ask(found, correlation_id=1, **END))["order"]
    found = world.probe(SEQUENCE % (OLDEST % (1, "")))
    told(ask(found, correlation_id=1, **START))
    waiting = ask(found, correlation_id=2, **START)
    ended = told(ask(found, correlation_id=1, **END))["order"]
    assert told(waiting)["order"] >= ended
    patient = f"preferred_batch_size: [ 2 ] max_queue_delay_microseconds: {NEVER_US}"
    for more, together in (("", 1), ("preferred_batch_size: [ 2 ]", 1), (patient, 2)):
        found = world.probe(SEQUENCE % (OLDEST % (4, more)))
        first = ask(found, correlation_id=1, **START)
        if together == 1:
            assert told(first)["together"] == 1
        else:
            second_one = ask(found, correlation_id=2, **START)
            assert [told(each)["together"] for each in (first, second_one)] == [2, 2]


@shows("sequence_batching.max_sequence_idle_microseconds")
def _idle(world: World) -> None:
    oldest = OLDEST % (2, "")
    brief = world.probe(SEQUENCE % f"max_sequence_idle_microseconds: 1 {oldest}")
    told(ask(brief, correlation_id=1, **START))
    text = error(lambda: [told(ask(brief, correlation_id=1)) for _ in range(1000)])
    assert "START" in text
    lasting = world.probe(SEQUENCE % f"max_sequence_idle_microseconds: {NEVER_US} {oldest}")
    told(ask(lasting, correlation_id=1, **START))
    assert told(ask(lasting, correlation_id=1))["order"] == 2


CONTROL = 'control_input { name: "%s" control { kind: CONTROL_SEQUENCE_%s %s } } oldest { }'


@shows(
    "sequence_batching.control_input.name",
    "sequence_batching.control_input.control.kind",
    "sequence_batching.control_input.control.int32_false_true",
    "sequence_batching.control_input.control.fp32_false_true",
    "sequence_batching.control_input.control.bool_false_true",
    "sequence_batching.control_input.control.data_type",
)
def _controls(world: World) -> None:
    def seen(name: str, kind: str, form: str) -> list[object]:
        found = world.probe(SEQUENCE % (CONTROL % (name, kind, form)))
        tensors = []
        for fields in (START, END):
            datatype, _, (value,) = told(ask(found, correlation_id=5, **fields))["inputs"][name]
            tensors += [datatype, value]
        return tensors

    assert seen("C", "START", "int32_false_true: [ 7, 8 ]") == ["int32", 8, "int32", 7]
    assert seen("D", "END", "int32_false_true: [ 7, 8 ]") == ["int32", 7, "int32", 8]
    assert seen("C", "START", "fp32_false_true: [ 7, 8 ]") == ["float32", 8, "float32", 7]
    assert seen("C", "START", "bool_false_true: [ false, true ]") == ["bool", True, "bool", False]
    assert seen("C", "CORRID", "data_type: TYPE_UINT32") == ["uint32", 5, "uint32", 5]


STATE = """
state {
  input_name: "S_IN" output_name: "%s" data_type: TYPE_%s dims: [ %s ] %s
} oldest { }
"""
INITIAL = 'initial_state { name: "%s" data_type: TYPE_%s dims: [ %s ] %s }'


@shows(
    "sequence_batching.state.input_name",
    "sequence_batching.state.output_name",
    "sequence_batching.state.data_type",
    "sequence_batching.state.dims",
    "sequence_batching.state.initial_state.data_type",
    "sequence_batching.state.initial_state.dims",
    "sequence_batching.state.initial_state.zero_data",
    "sequence_batching.state.initial_state.data_file",
    "sequence_batching.state.initial_state.name",
)
def _states(world: World) -> None:
    def seen(output: str, datatype: str, dims: str, initial: str = "") -> list[object]:
        config = SEQUENCE % (STATE % (output, datatype, dims, initial)) + ON_CPU
        files = {"initial_state/five": np.full(2, 5, np.int32).tobytes()}
        found = world.load(PYTHON + "max_batch_size: 8\n" + X + T + config, files)
        requests = [ask(found, correlation_id=1, **START), ask(found, correlation_id=1)]
        return [told(each)["inputs"]["S_IN"] for each in requests]

    ones, twos = ["int32", [1, 2], [0, 0]], ["int32", [1, 2], [1, 1]]
    assert seen("S_OUT", "INT32", "2") == [ones, twos]
    assert seen("OTHER", "INT32", "2") == [ones, ones]
    assert seen("S_OUT", "FP32", "1") == [["float32", [1, 1], [0]], ["float32", [1, 1], [1]]]
    file = INITIAL % ("s", "INT32", "2", 'data_file: "five"')
    assert seen("S_OUT", "INT32", "2", file)[0] == ["int32", [1, 2], [5, 5]]
    zero = INITIAL % ("s", "INT32", "3", "zero_data: true")
    assert seen("S_OUT", "INT32", "-1", zero)[0] == ["int32", [1, 3], [0, 0, 0]]
    base = PYTHON + "max_batch_size: 8\n" + X + T + ON_CPU
    for name, datatype in (("", "INT32"), ("s", "FP32")):
        wrong = INITIAL % (name, datatype, "2", "zero_data: true")
        assert "S_IN" in world.refused(base + SEQUENCE % (STATE % ("S_OUT", "INT32", "2", wrong)))


@shows("sequence_batching.iterative_sequence")
def _iterative(world: World) -> None:
    rounds = 'parameters { key: "rounds" value { string_value: "3" } }\n'
    oldest = OLDEST % (2, "")
    iterative = world.probe(SEQUENCE % f"iterative_sequence: true {oldest}" + rounds)
    assert told(ask(iterative))["order"] == 3
    once = world.probe(SEQUENCE % oldest + rounds)
    assert "RESCHEDULE" in error(lambda: told(ask(once, correlation_id=1, **START)))


# Ensembles.

ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
ensemble_scheduling {
  %s step { model_name: "%s" model_version: %d input_map { key: "X" value: "%s" } %s }
}
"""


@shows(
    "ensemble_scheduling.step.model_name",
    "ensemble_scheduling.step.model_version",
    "ensemble_scheduling.step.input_map",
    "ensemble_scheduling.step.output_map",
)
def _ensemble(world: World) -> None:
    policy = "version_policy { all { } }\n"
    member = world.load(PYTHON + "max_batch_size: 8\n" + X + T + policy + ON_CPU, versions=(1, 2))
    output = 'output_map { key: "T" value: "%s" }'
    for version, found in ((-1, "2"), (1, "1")):
        config = ENSEMBLE % ("", member.name, version, "X", output % "T")
        assert told(ask(world.load(config + X + T)))["version"] == found
    renamed = ENSEMBLE % ("", member.name, -1, "IN", output % "T") + X.replace('"X"', '"IN"') + T
    assert told(ask(world.load(renamed), {"IN": x(1)["X"]}))["version"] == "2"
    wrong = ENSEMBLE % ("", member.name, -1, "X", output % "U")
    assert world.refused(wrong + X + T)
    assert "nobody" in world.refused(ENSEMBLE % ("", "nobody", -1, "X", output % "T") + X + T)


@shows("ensemble_scheduling.max_inflight_requests")
def _in_flight(world: World) -> None:
    """A decoupled step gives four responses; the field limits executions of the next step."""
    source = world.load(
        IDENTITY.replace("-1", "1")
        + "max_batch_size: 8\n"
        + "model_transaction_policy { decoupled: true }\n"
        + 'parameters { key: "responses" value { string_value: "4" } }\n'
    )
    group = "instance_group { kind: KIND_CPU count: 4 }\n"
    for limit, at_once in (("", 4), ("max_inflight_requests: 1", 1)):
        gate = world.gate()
        sink = world.probe(gate.config + group)
        last = f'step {{ model_name: "{sink.name}" model_version: -1 '
        last += 'input_map { key: "X" value: "M" } output_map { key: "T" value: "T" } }'
        config = ENSEMBLE % (limit, source.name, -1, "X", 'output_map { key: "Y" value: "M" }')
        config = config.rstrip().removesuffix("}") + last + " }\n"
        asked = ask(world.load(config + X + T), x(*HELD))
        gate.reached(at_once)
        held = gate.count
        gate.open()
        assert len(list(asked)) == 4
        assert held == at_once


@pytest.mark.parametrize(
    "effect", [*dict.fromkeys(EFFECTS.values())], ids=lambda each: each.__name__
)
def test_fields_have_their_effects(effect: Effect, world: World) -> None:
    try:
        effect(world)
    finally:
        world.unload()
