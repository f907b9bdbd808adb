"""Sequences as clients meet them, on real models; what a real Triton answered is the expectation.

Null rows, controls, errors, timeouts and cancellation were compared with a Python model that
echoes what it is given.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from onnx import TensorProto
from tritonclient.grpc import service_pb2

from tests.conformance.clients import Client, connect
from tests.conformance.models import HOLD, identity
from tests.leaving import FAILURES, IN_FLIGHT, PENDING, reached
from tests.onnx_models import constant, model, node, tensor, write
from tests.rpc import connected, streaming
from tests.serving import Serving, held, series, serving, wait_until, write_model

FLAGS = ("--exit-on-error=false", "--strict-readiness=false", "--model-control-mode=explicit")
FLAGS = (*FLAGS, "--load-model=*", "--exit-timeout-secs=2")
WIRES = ("http.aio", "grpc.aio")
INT64, INT32, FP32 = TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT
BATCH = ("batch", 1)

CONTROLS = """control_input [
  { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } },
  { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 1 ] } },
  { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } },
  { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_%s } }
]"""
IDLE = "max_sequence_idle_microseconds: 60000000"
STARTED = "must specify the START flag on the first request of the sequence"
SOON_SECS = 10


def telling(element: int = TensorProto.UINT64) -> Any:
    """TOLD: start, end, ready, rows of the batch; ID_OUT: the id."""
    flags = [("START", INT32), ("END", FP32), ("READY", TensorProto.BOOL)]
    casts = [node("Cast", name, f"{name}_n", to=INT64) for name, _ in flags]
    return model(
        [
            *casts,
            node("Shape", "INPUT", "count", end=1),
            node("Concat", "count one", "column", axis=0),
            node("Expand", "count column", "rows"),
            node("Concat", "START_n END_n READY_n rows", "TOLD", axis=1),
            node("Identity", "ID", "ID_OUT"),
        ],
        [
            tensor("INPUT", ("batch", "width"), INT32),
            *(tensor(name, BATCH, kind) for name, kind in flags),
            tensor("ID", BATCH, element),
        ],
        [tensor("TOLD", ("batch", 4), INT64), tensor("ID_OUT", BATCH, element)],
        [constant("one", np.array([1], np.int64))],
    )


def telling_config(strategy: str, id_type: str = "UINT64") -> str:
    return f"""max_batch_size: 4
input {{ name: "INPUT" data_type: TYPE_INT32 dims: [-1] }}
output [
  {{ name: "TOLD" data_type: TYPE_INT64 dims: [4] }},
  {{ name: "ID_OUT" data_type: TYPE_{id_type} dims: [1] }}
]
sequence_batching {{ {IDLE} {strategy} {CONTROLS % id_type} }}
instance_group {{ count: 1 kind: KIND_CPU }}
"""


def adding() -> Any:
    """SUM = SUM_IN + INPUT, which is the state, too."""
    return model(
        [node("Add", "INPUT SUM_IN", "SUM"), node("Identity", "SUM", "SUM_OUT")],
        [tensor("INPUT", BATCH, INT32), tensor("SUM_IN", BATCH, INT32)],
        [tensor("SUM", BATCH, INT32), tensor("SUM_OUT", BATCH, INT32)],
    )


def adding_config(more: str = "", outputs: str = "", strategy: str = "direct { }") -> str:
    return f"""max_batch_size: 4
input {{ name: "INPUT" data_type: TYPE_INT32 dims: [1] }}
output [ {{ name: "SUM" data_type: TYPE_INT32 dims: [1] }} {outputs} ]
sequence_batching {{ {IDLE} {strategy} state {{
  input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_INT32 dims: [1] {more}
}} }}
instance_group {{ count: 1 kind: KIND_CPU }}
"""


def remembering() -> Any:
    """ALL: what the sequence has sent so far, which is the state, too; it begins with one zero."""
    return model(
        [node("Concat", "PAST INPUT", "ALL", axis=1), node("Identity", "ALL", "PAST_OUT")],
        [tensor("INPUT", BATCH, INT32), tensor("PAST", ("batch", "past"), INT32)],
        [tensor("ALL", ("batch", "all"), INT32), tensor("PAST_OUT", ("batch", "all"), INT32)],
    )


REMEMBERING = f"""max_batch_size: 4
input {{ name: "INPUT" data_type: TYPE_INT32 dims: [1] }}
output {{ name: "ALL" data_type: TYPE_INT32 dims: [-1] }}
sequence_batching {{ {IDLE} oldest {{ }} state {{
  input_name: "PAST" output_name: "PAST_OUT" data_type: TYPE_INT32 dims: [-1]
}} }}
instance_group {{ count: 1 kind: KIND_CPU }}
"""


def quoting() -> Any:
    """LAST: what the sequence sent before, a string."""
    kind = TensorProto.STRING
    return model(
        [node("Identity", "BEFORE", "LAST"), node("Identity", "INPUT", "AFTER")],
        [tensor("INPUT", BATCH, kind), tensor("BEFORE", BATCH, kind)],
        [tensor("LAST", BATCH, kind), tensor("AFTER", BATCH, kind)],
    )


QUOTING = f"""max_batch_size: 4
input {{ name: "INPUT" data_type: TYPE_STRING dims: [1] }}
output {{ name: "LAST" data_type: TYPE_STRING dims: [1] }}
sequence_batching {{ {IDLE} state {{
  input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_STRING dims: [1]
  initial_state {{ name: "first" data_type: TYPE_STRING dims: [1] data_file: "first" }}
}} }}
instance_group {{ count: 1 kind: KIND_CPU }}
"""
ROUNDS = """import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.rounds = {}

    def execute(self, requests):
        for request in requests:
            start, ready, count = (
                int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().item())
                for name in ("START", "READY", "INPUT")
            )
            if ready:
                self.answer(request, start, count)

    def answer(self, request, start, count):
        number = request.correlation_id()
        self.rounds[number] = 1 if start else self.rounds[number] + 1
        last = self.rounds[number] == count
        tensor = pb_utils.Tensor("SUM", np.array([[self.rounds[number]]], np.int32))
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
        request.get_response_sender().send(pb_utils.InferenceResponse([tensor]), flags=flags)
        if not last:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
"""
ADDING_IN_PYTHON = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        found = sum(
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            for name in ("INPUT", "SUM_IN")
        )
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, found) for name in ("SUM", "SUM_OUT")]
        )
"""
AROUND = """platform: "ensemble"
max_batch_size: 4
input { name: "INPUT" data_type: TYPE_INT32 dims: [1] }
output { name: "SUM" data_type: TYPE_INT32 dims: [1] }
ensemble_scheduling { step {
  model_name: "adding" model_version: -1
  input_map { key: "INPUT" value: "INPUT" } output_map { key: "SUM" value: "SUM" }
} }
"""


def rounds(strategy: str) -> str:
    return f"""backend: "python"
max_batch_size: 4
model_transaction_policy {{ decoupled: true }}
input {{ name: "INPUT" data_type: TYPE_INT32 dims: [1] }}
output {{ name: "SUM" data_type: TYPE_INT32 dims: [1] }}
sequence_batching {{ iterative_sequence: true {IDLE} {strategy} {{ }} control_input [
  {{ name: "START" control {{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }} }},
  {{ name: "READY" control {{ kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] }} }}
] }}
instance_group {{ count: 1 kind: KIND_CPU }}
"""


ZERO = 'initial_state { name: "zero" data_type: TYPE_INT32 dims: [1] zero_data: true }'
TEN = 'initial_state { name: "ten" data_type: TYPE_INT32 dims: [1] data_file: "ten" }'
SHOWN = ', { name: "SUM_OUT" data_type: TYPE_INT32 dims: [1] }'


def holding(strategy: str, idle_us: int = 60_000_000) -> str:
    batching = f"sequence_batching {{ max_sequence_idle_microseconds: {idle_us} {strategy} }}"
    return identity("INT32", "1", **HOLD) + f"max_batch_size: 1 {batching}"


BROKEN = {
    "short_file": (
        adding_config(TEN),
        "initial_state setting expects 4 bytes, but the data provided from tenonly has 1 bytes.",
    ),
    "no_file": (adding_config(TEN), "failed to open text file for read no_file/initial_state/ten"),
    "no_state": (
        adding_config().replace('"SUM_IN"', '"OTHER"'),
        "unexpected inference input 'OTHER', allowed inputs are: INPUT, SUM_IN",
    ),
    "no_control": (
        telling_config("direct { }").replace('"READY"', '"MISSING"'),
        "configuration specified sequence control 'MISSING', but model does not provide that input",
    ),
    "no_utilization": (
        telling_config("direct { minimum_slot_utilization: 1.5 }"),
        "sequence batching minimum slot utilization must be in range (0.0, 1.0] for no_utilization",
    ),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each kind for each wire, so that no test sees the statistics of another."""
    folder = tmp_path_factory.mktemp("sequences")
    for wire in WIRES:
        write(folder, f"direct_{wire}", telling(), telling_config("direct { }"))
        text = telling(element=TensorProto.STRING)
        write(folder, f"text_{wire}", text, telling_config("oldest { }", "STRING"))
        write_model(folder, f"slots_{wire}", holding("direct { }"))
        write_model(folder, f"oldest_{wire}", holding("oldest { max_candidate_sequences: 1 }"))
        write_model(folder, f"idle_{wire}", holding("direct { }", idle_us=50_000))
    write(folder, "adding", adding(), adding_config(ZERO))
    write(folder, "adding_oldest", adding(), adding_config(ZERO, strategy="oldest { }"))
    write(folder, "warm", adding(), warm_config())
    write(folder, "from_ten", adding(), adding_config(TEN, SHOWN))
    for strategy in ("direct", "oldest"):
        write_python(folder, f"rounds_{strategy}", rounds(strategy), ROUNDS)
    python = f'backend: "python"\n{adding_config(ZERO)}'
    write_python(folder, "adding_python", python, ADDING_IN_PYTHON)
    write_model(folder, "around", AROUND)
    write(folder, "remembering", remembering(), REMEMBERING)
    write(folder, "quoting", quoting(), QUOTING)
    write(
        folder,
        "completed",
        adding(),
        "sequence_batching" + adding_config().split("sequence_batching")[1],
    )
    for name, (config, _) in BROKEN.items():
        write(folder, name, adding() if "SUM" in config else telling(), config)
    state(folder, "from_ten", "ten", (10).to_bytes(4, "little"))
    state(folder, "short_file", "ten", b"\n")
    state(folder, "quoting", "first", b"\x02\x00\x00\x00hi")
    return folder


def write_python(folder: Path, name: str, config: str, code: str) -> None:
    write_model(folder, name, config)
    (folder / name / "1" / "model.py").write_text(code)


def warm_config() -> str:
    inputs = "".join(
        f'inputs {{ key: "{name}" value {{ data_type: TYPE_INT32 dims: [1] zero_data: true }} }}'
        for name in ("INPUT", "SUM_IN")
    )
    return adding_config() + f'model_warmup {{ name: "w" batch_size: 2 {inputs} }}'


def state(folder: Path, name: str, file: str, data: bytes) -> None:
    (folder / name / "initial_state").mkdir()
    (folder / name / "initial_state" / file).write_bytes(data)


@pytest.fixture(params=WIRES)
async def client(request: pytest.FixtureRequest, server: Serving) -> AsyncIterator[Client]:
    async with connect(server, request.param) as found:
        yield found


@pytest.fixture(scope="module")
def stub(server: Serving) -> Iterator[Any]:
    with connected(server.grpc) as found:
        yield found


def given(client: Client, *values: int, rows: int = 1) -> list[Any]:
    library: Any = tritonclient.http if client.over_http else tritonclient.grpc
    found = library.InferInput("INPUT", [rows, len(values) // rows], "INT32")
    found.set_data_from_numpy(np.array([values], np.int32).reshape(rows, -1))
    return [found]


def options(sequence: int | str, flags: str, **more: Any) -> dict[str, Any]:
    start, end = "start" in flags, "end" in flags
    return {"sequence_id": sequence, "sequence_start": start, "sequence_end": end, **more}


async def ask(
    client: Client, name: str, sequence: int | str, value: int, flags: str = "", **more: Any
) -> Any:
    inputs = more.pop("inputs", None) or given(client, value)
    return await client.call("infer", name, inputs, **options(sequence, flags, **more))


async def refusal(
    client: Client, name: str, sequence: int | str, flags: str = "", **more: Any
) -> tuple[str, str]:
    inputs = more.pop("inputs", None) or given(client, 1)
    return await client.refusal("infer", name, inputs, **options(sequence, flags, **more))


async def told(client: Client, name: str, sequence: int | str, flags: str = "") -> list[Any]:
    """Start, end, ready, rows, and the id."""
    found = await ask(client, name, sequence, 1, flags)
    return [*found.as_numpy("TOLD")[0].tolist(), found.as_numpy("ID_OUT")[0, 0]]


async def added(client: Client, name: str, sequence: int, value: int, flags: str = "") -> int:
    return int((await ask(client, name, sequence, value, flags)).as_numpy("SUM")[0, 0])


# Inputs of the model.


async def test_a_sequence_from_its_start_to_its_end(client: Client) -> None:
    name = f"direct_{client.wire}"
    found = [await told(client, name, 11, flags) for flags in ("start", "", "start", "end")]
    assert found == [[1, 0, 1, 1, 11], [0, 0, 1, 1, 11], [1, 0, 1, 1, 11], [0, 1, 1, 1, 11]]
    assert await told(client, name, 12, "start end") == [1, 1, 1, 1, 12]
    assert await refusal(client, name, 11) == (
        client.code("INVALID_ARGUMENT"),
        f"inference request for sequence 11 to model '{name}' {STARTED}",
    )


@pytest.mark.own_models("the only instance")
async def test_rows_of_slots_without_a_request_are_in_the_batch_and_not_counted(
    client: Client,
) -> None:
    name = f"direct_{client.wire}"
    before = (await client.statistics(name)).model_stats[0]
    found = [await told(client, name, number, "start") for number in (1, 2, 3)]
    assert found == [[1, 0, 1, 1, 1], [1, 0, 1, 2, 2], [1, 0, 1, 3, 3]]
    after = (await client.statistics(name)).model_stats[0]
    assert after.inference_count - before.inference_count == 3
    assert after.execution_count - before.execution_count == 3
    sizes = {each.batch_size: each.compute_infer.count for each in after.batch_stats}
    assert (sizes[2], sizes[3]) == (1, 1)
    for number in (1, 2, 3):
        await told(client, name, number, "end")


async def test_ids_may_be_strings(client: Client) -> None:
    name = f"text_{client.wire}"
    found = [await told(client, name, "one", flags) for flags in ("start", "", "end")]
    assert found == [[1, 0, 1, 1, b"one"], [0, 0, 1, 1, b"one"], [0, 1, 1, 1, b"one"]]


async def test_controls_and_states_are_no_inputs_and_outputs_for_clients(client: Client) -> None:
    metadata = await client.metadata(f"direct_{client.wire}")
    assert [each.name for each in metadata.inputs] == ["INPUT"]
    for name in ("adding", "completed"):
        metadata = await client.metadata(name)
        assert [each.name for each in metadata.inputs] == ["INPUT"]
        assert [each.name for each in metadata.outputs] == ["SUM"]
    config = await client.config("completed")
    assert config.sequence_batching.state[0].input_name == "SUM_IN"
    assert not config.HasField("dynamic_batching")


# Refusals.


async def test_requests_that_have_no_place_in_a_sequence(client: Client) -> None:
    name, code = f"direct_{client.wire}", client.code("INVALID_ARGUMENT")
    for nobody in (0, ""):
        assert await refusal(client, name, nobody, request_id="r") == (
            code,
            f"inference request to model '{name}' must specify a non-zero or non-empty "
            "correlation ID",
        )
    assert await refusal(client, name, 7, request_id="r") == (
        code,
        f"inference request for sequence 7 to model '{name}' {STARTED}",
    )
    inputs = given(client, 1, 2, rows=2)
    assert await refusal(client, name, 7, "start", inputs=inputs) == (
        code,
        f"inference request to model '{name}' must specify batch-size 1 due to requirements of "
        "sequence batcher",
    )
    assert await told(client, name, 8, "start end") == [1, 1, 1, 1, 8]


async def test_an_id_of_the_wrong_type(client: Client) -> None:
    code = client.code("INVALID_ARGUMENT")
    name = f"direct_{client.wire}"
    assert await refusal(client, name, "x", "start", request_id="r") == (
        code,
        f"[request id: r] sequence batching control 'ID' data-type is 'BYTES', but model '{name}' "
        "expects 'UINT64'",
    )
    name = f"text_{client.wire}"
    assert await refusal(client, name, 7, "start", request_id="r") == (
        code,
        f"[request id: r] sequence batching control 'ID' data-type is 'UINT64', but model '{name}' "
        "expects 'BYTES'",
    )
    assert await told(client, name, "x", "start end") == [1, 1, 1, 1, b"x"]


def test_a_stream_continues_after_a_request_without_start(server: Serving, stub: Any) -> None:
    with streaming(stub) as rpc:
        rpc.ask(
            message("adding", 5, 1, "a"),
            message("adding", 5, 2, "b", "start"),
            message("adding", 5, 3, "c", "end"),
        )
        found = rpc.rest()
    texts = [each.error_message for each in found]
    assert texts == [f"inference request for sequence 5 to model 'adding' {STARTED}", "", ""]
    assert [sum_of(each) for each in found[1:]] == [2, 5]


def message(name: str, sequence: int, value: int, request_id: str, flags: str = "") -> Any:
    """A request of ModelStreamInfer."""
    found = service_pb2.ModelInferRequest(model_name=name, id=request_id)
    found.inputs.add(name="INPUT", datatype="INT32", shape=[1, 1])
    found.raw_input_contents.append(value.to_bytes(4, "little"))
    found.parameters["sequence_id"].int64_param = sequence
    found.parameters["sequence_start"].bool_param = "start" in flags
    found.parameters["sequence_end"].bool_param = "end" in flags
    return found


def sum_of(answer: Any) -> int:
    return int.from_bytes(answer.infer_response.raw_output_contents[0], "little")


# States.


@pytest.mark.parametrize("name", ["adding", "adding_oldest"])
async def test_a_state_goes_from_each_request_to_the_next(client: Client, name: str) -> None:
    base = 100 if client.over_http else 200
    found = [await added(client, name, base, value, flags) for value, flags in (
        (1, "start"), (2, ""), (4, "start"), (8, "end"))]  # fmt: skip
    assert found == [1, 3, 4, 12]
    sums = await asyncio.gather(*(alone(client, name, base + n) for n in range(1, 9)))
    assert sums == [[base + n, 2 * (base + n), 3 * (base + n)] for n in range(1, 9)]


async def alone(client: Client, name: str, number: int) -> list[int]:
    return [await added(client, name, number, number, flags) for flags in ("start", "", "end")]


async def test_a_state_begins_with_what_its_file_says_and_may_be_an_output(client: Client) -> None:
    sequence = WIRES.index(client.wire) + 1
    found = await ask(client, "from_ten", sequence, 1, "start")
    assert (found.as_numpy("SUM").item(), found.as_numpy("SUM_OUT").item()) == (11, 11)
    assert await added(client, "from_ten", sequence, 1, "end") == 12
    hidden = await client.refusal(
        "infer",
        "adding",
        given(client, 1),
        outputs=[requested(client, "SUM_OUT")],
        **options(sequence, "start"),
    )
    assert hidden[1].endswith("unexpected inference output 'SUM_OUT' for model 'adding'")


def requested(client: Client, name: str) -> Any:
    library: Any = tritonclient.http if client.over_http else tritonclient.grpc
    return library.InferRequestedOutput(name)


@pytest.mark.own_models("the statistics of executions")
async def test_a_warm_up_gives_the_states_by_their_names(client: Client) -> None:
    sequence = WIRES.index(client.wire) + 1
    assert await added(client, "warm", sequence, 5, "start end") == 5
    (row,) = (await client.statistics("warm")).model_stats
    assert 2 in [each.batch_size for each in row.batch_stats]


async def test_a_state_may_grow(client: Client) -> None:
    sequence = WIRES.index(client.wire) + 1
    found = [
        (await ask(client, "remembering", sequence, value, flags)).as_numpy("ALL").tolist()
        for value, flags in ((5, "start"), (6, ""), (7, "end"))
    ]
    assert found == [[[0, 5]], [[0, 5, 6]], [[0, 5, 6, 7]]]


async def test_states_that_have_grown_apart_do_not_disturb_each_other(client: Client) -> None:
    first = 10 * (WIRES.index(client.wire) + 1)

    async def lasting(number: int) -> list[list[int]]:
        flags = ["start", *[""] * (number - 1), "end"]
        return [
            (await ask(client, "remembering", number + first, value, each))
            .as_numpy("ALL")
            .tolist()[0]
            for value, each in enumerate(flags, 1)
        ]

    found = await asyncio.gather(*(lasting(number) for number in range(1, 5)))
    assert [each[-1] for each in found] == [list(range(number + 2)) for number in range(1, 5)]


async def test_a_state_may_be_text(client: Client) -> None:
    library: Any = tritonclient.http if client.over_http else tritonclient.grpc
    found = []
    for text, flags in (("a", "start"), ("b", ""), ("c", "end")):
        tensor = library.InferInput("INPUT", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[text]], dtype=object))
        answer = await ask(client, "quoting", 1, 0, flags, inputs=[tensor])
        found.append(answer.as_numpy("LAST").item())
    assert found == [b"hi", b"a", b"b"]


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.own_models("loads and unloads")
async def test_a_model_whose_sequences_cannot_be_is_not_loaded(client: Client, name: str) -> None:
    found = await client.refusal("load_model", name)
    assert BROKEN[name][1] in found[1]
    assert "/tmp" not in found[1]


# Backlog, timeouts, and disconnects.


@pytest.mark.own_models("the queue")
async def test_a_sequence_that_waits_for_a_slot_begins_when_another_ends(
    server: Serving, client: Client
) -> None:
    name = f"slots_{client.wire}"
    await ask(client, name, 1, 1, "start")
    waiting = [asyncio.create_task(ask(client, name, 2, 2, "start"))]
    await reached(server, name, in_flight=1, pending=1)
    late = [asyncio.create_task(refusal(client, name, 3, "start", timeout=3_000_000))]
    await reached(server, name, in_flight=2, pending=2)
    late.append(asyncio.create_task(refusal(client, name, 3)))
    expired = (
        client.code("UNAVAILABLE"),
        "timeout of the corresponding sequence has been expired",
    )
    assert [await each for each in late] == [expired] * 2
    assert server.metrics()[series(FAILURES, name, reason="REJECTED")] == 2
    await ask(client, name, 1, 3, "end")
    assert (await waiting[0]).as_numpy("OUTPUT").item() == 2
    await ask(client, name, 2, 4, "end")


@pytest.mark.parametrize("strategy", ["slots", "oldest"])
@pytest.mark.own_models("the queue")
async def test_with_a_client_that_leaves_go_the_queued_requests_of_its_sequence(
    server: Serving, repository: Path, client: Client, strategy: str
) -> None:
    name = f"{strategy}_{client.wire}"
    await ask(client, name, 21, 1, "start")
    with held(repository, name):
        executing = asyncio.create_task(ask(client, name, 21, 2))
        await reached(server, name, in_flight=1, pending=0)
        leaving = asyncio.create_task(ask(client, name, 21, 3))
        await reached(server, name, in_flight=2, pending=1)
        staying = asyncio.create_task(refusal(client, name, 21))
        await reached(server, name, in_flight=3, pending=2)
        neighbour = asyncio.create_task(ask(client, name, 22, 4, "start end"))
        await reached(server, name, in_flight=4, pending=3)
        leaving.cancel()
        assert (await staying)[0] in ("CANCELLED", "400")
    assert (await executing).as_numpy("OUTPUT").item() == 2
    assert (await neighbour).as_numpy("OUTPUT").item() == 4
    assert (await refusal(client, name, 21))[1].endswith(STARTED)


@pytest.mark.own_models("the queue")
def test_a_stream_that_vanishes_leaves_its_slot_to_the_next(
    server: Serving, repository: Path, stub: Any
) -> None:
    name = "slots_grpc.aio"
    with held(repository, name), streaming(stub) as rpc:
        rpc.ask(message(name, 31, 1, "a", "start"))
        rpc.ask(*(message(name, 31, value, str(value)) for value in range(2, 6)))
        wait_until(lambda: server.metric(PENDING, name) == 4, "four are queued")
        rpc.cancel()
        wait_until(lambda: server.metric(IN_FLIGHT, name) == 0, "all have gone")
    with streaming(stub) as rpc:
        rpc.ask(message(name, 32, 7, "b", "start end"))
        assert sum_of(rpc.rest()[0]) == 7


@pytest.mark.own_models("the only instance")
async def test_an_idle_sequence_is_forgotten_without_a_word(
    server: Serving, client: Client
) -> None:
    name = f"idle_{client.wire}"
    await ask(client, name, 1, 1, "start")
    await ask(client, name, 2, 2, "start end")
    found = await refusal(client, name, 1)
    assert found[1] == f"inference request for sequence 1 to model '{name}' {STARTED}"


# Reloads.


@pytest.mark.own_models("loads and unloads")
async def test_a_sequence_survives_the_reload_of_another_model(client: Client) -> None:
    sequence = 50 + WIRES.index(client.wire)
    assert await added(client, "adding", sequence, 1, "start") == 1
    await client.call("load_model", "remembering", config=None)
    await client.call("unload_model", "quoting")
    await client.call("load_model", "quoting")
    assert await added(client, "adding", sequence, 2, "end") == 3


@pytest.mark.own_models("loads and unloads")
async def test_a_reload_of_its_own_model_ends_a_sequence_after_what_it_has_queued(
    server: Serving, repository: Path, client: Client
) -> None:
    name = f"slots_{client.wire}"
    await ask(client, name, 41, 1, "start")
    with held(repository, name):
        queued = [asyncio.create_task(ask(client, name, 41, value)) for value in (2, 3)]
        await reached(server, name, in_flight=2, pending=1)
        await client.call("unload_model", name)
    await client.call("load_model", name)
    assert (await refusal(client, name, 41))[1].endswith(STARTED)
    assert [(await each).as_numpy("OUTPUT").item() for each in queued] == [2, 3]


# Python models, and ensembles.


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
async def test_a_python_model_may_ask_for_a_request_again_until_it_is_done(
    stub: Any, strategy: str
) -> None:
    with streaming(stub) as rpc:
        rpc.ask(*(message(f"rounds_{strategy}", 0, count, str(count)) for count in range(1, 9)))
        found = rpc.rest()
    told: dict[str, list[int]] = {}
    for each in found:
        assert not each.error_message
        told.setdefault(each.infer_response.id, []).append(sum_of(each))
    assert told == {str(count): list(range(1, count + 1)) for count in range(1, 9)}


async def test_a_python_model_may_keep_a_state(client: Client) -> None:
    sequences = range(10 * WIRES.index(client.wire) + 1, 10 * WIRES.index(client.wire) + 9)
    found = await asyncio.gather(*(alone(client, "adding_python", each) for each in sequences))
    assert found == [[each, 2 * each, 3 * each] for each in sequences]


async def test_a_step_of_an_ensemble_belongs_to_the_sequence_of_its_request(client: Client) -> None:
    first = 300 + 10 * WIRES.index(client.wire)
    sequences = range(first, first + 6)
    found = await asyncio.gather(*(alone(client, "around", each) for each in sequences))
    assert found == [[each, 2 * each, 3 * each] for each in sequences]
    assert (await refusal(client, "around", first))[1] == (
        f"in ensemble 'around', inference request for sequence {first} to model 'adding' {STARTED}"
    )


# The end of the server.


@pytest.mark.own_models("open sequences")
async def test_a_sequence_that_has_begun_may_end_while_the_server_drains(tmp_path: Path) -> None:
    write(tmp_path, "adding", adding(), adding_config(ZERO))
    with serving(tmp_path) as server:
        async with connect(server, "http.aio") as http, connect(server, "grpc.aio") as rpc:
            for sequence, client in enumerate((http, rpc), 1):
                assert await added(client, "adding", sequence, 1, "start") == 1
            server.begin_stop()
            await asyncio.to_thread(server.wait_logged, "draining requests=")
            for sequence, client in enumerate((http, rpc), 1):
                for new in (sequence, 3):
                    refused = await refusal(client, "adding", new, "start")
                    assert refused == (client.code("UNAVAILABLE"), "Server exiting")
                assert await added(client, "adding", sequence, 2) == 3
            with connected(server.grpc) as stub, streaming(stub) as stream:
                stream.ask(message("adding", 2, 4, "a"), message("adding", 3, 5, "b", "start"))
                found = stream.rest()
            assert [each.error_message for each in found] == ["", "Server exiting"]
            assert sum_of(found[0]) == 7
            assert await added(http, "adding", 1, 8, "end") == 11
            assert await added(rpc, "adding", 2, 8, "end") == 15
        assert server.wait_ended() == 0
    assert not any("drain over" in line for line in server.log)


@pytest.mark.own_models("open sequences")
async def test_a_sequence_without_an_end_blocks_shutdown_until_the_limit(tmp_path: Path) -> None:
    write(tmp_path, "adding", adding(), adding_config(ZERO))
    with serving(tmp_path, "--exit-timeout-secs=1") as server:
        async with connect(server, "grpc.aio") as client:
            assert await added(client, "adding", 1, 1, "start") == 1
            server.begin_stop()
            await asyncio.to_thread(server.wait_logged, "draining requests=")
            assert await added(client, "adding", 1, 1) == 2
            assert await asyncio.to_thread(server.wait_ended, 1 + SOON_SECS) == 0
