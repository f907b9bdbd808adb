"""Golden requests made of clients' requests: what is written is read back, and the answers pass."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.messages import InferRequest, InferResponse, Usage
from gateway.models.golden.answer import ExpectedAnswer, GoldenAnswer
from gateway.models.golden.recorded import GoldenDraft, NotRecordable, tolerances
from gateway.openai_contract import REQUEST, RESPONSE, Endpoint, RequestBody, request_tensors
from gateway.tensor import BF16_BITS, NUMPY_TYPES, Datatype, Tensor, array_tensor, text_tensor
from tests.builders import TEXT, text_request

NAN = float("nan")
CHAT = replace(
    TEXT,
    input=(
        ModelInput(name=REQUEST, data_type=DataType.TYPE_STRING, dims=(1,)),
        ModelInput(
            name="openai_endpoint", data_type=DataType.TYPE_STRING, dims=(1,), optional=True
        ),
    ),
    output=(ModelOutput(name=RESPONSE, data_type=DataType.TYPE_STRING, dims=(1,)),),
)


def config(datatype: Datatype) -> ModelConfig:
    """A model with one input x and one output y, of any size."""
    kind = DataType.of(datatype)
    return replace(
        TEXT,
        input=(ModelInput(name="x", data_type=kind, dims=(-1,)),),
        output=(ModelOutput(name="y", data_type=kind, dims=(-1,)),),
    )


def answered(*outputs: Tensor, finish: str = "") -> GoldenAnswer:
    usage = Usage(finish_reason=finish) if finish else None
    return GoldenAnswer([InferResponse(outputs=outputs, final=True, usage=usage)])


def texts(*answers: str) -> list[GoldenAnswer]:
    return [answered(text_tensor("text_output", [each])) for each in answers]


def completed(
    draft: GoldenDraft, answers: Sequence[GoldenAnswer], clean: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], ExpectedAnswer]:
    expected = draft.complete(answers, clean or {}, 0.1)
    return draft.members["expect"], expected


async def similarity(model: str, one: str, other: str) -> float:
    raise AssertionError("no model compares texts here")


def tensor(name: str, datatype: Datatype, count: int) -> Tensor:
    """Values of all kinds: negative ones, fractions, and the largest."""
    if datatype is Datatype.BYTES:
        return text_tensor(name, [f"é {n}" for n in range(count)])
    if datatype is Datatype.BF16:
        return Tensor(name, datatype, (count,), np.arange(count).astype(BF16_BITS).data)
    dtype = NUMPY_TYPES[datatype]
    if dtype.kind == "f":
        values = np.linspace(-3.3, 7.7, count)
    else:
        most = 1 if dtype.kind == "b" else np.iinfo(dtype).max
        values = np.array([most, *[1] * (count - 1)], dtype)
    return array_tensor(name, datatype, values.astype(dtype))


@pytest.mark.parametrize("count", [1, 3, 3000])
@pytest.mark.parametrize("datatype", Datatype)
async def test_tensors_are_read_back_as_they_were_and_their_answer_passes(
    datatype: Datatype, count: int
) -> None:
    asked = InferRequest(model="m", inputs=(tensor("x", datatype, count),))
    draft = GoldenDraft(asked, config(datatype))
    found = draft.request().inputs[0]
    given = asked.inputs[0]
    assert (found.name, found.datatype, found.shape) == ("x", datatype, (count,))
    assert bytes(found.raw()) == bytes(given.raw())
    answers = [answered(tensor("y", datatype, count)) for _ in range(4)]
    _, expected = completed(draft, answers)
    await expected.check(answers[0], similarity)
    is_long = datatype is not Datatype.BYTES and given.array().nbytes > 4096
    assert bool(draft.arrays) is (is_long or datatype is Datatype.UINT64)


async def test_bytes_that_are_no_text_are_read_back_and_never_expected() -> None:
    data = (b"\xff\xd8 jpeg", b"a")
    draft = GoldenDraft(
        InferRequest(model="m", inputs=(Tensor("x", Datatype.BYTES, (2,), data),)),
        config(Datatype.BYTES),
    )
    assert draft.request().inputs[0].elements() == data
    with pytest.raises(NotRecordable, match="no pattern can redact"):
        draft.texts()
    answers = [answered(Tensor("y", Datatype.BYTES, (2,), data))]
    with pytest.raises(NotRecordable, match="output 'y' has bytes that are no text"):
        draft.complete(answers, {}, 0.1)
    ends = Tensor("x", Datatype.BYTES, (1,), (b"\xff\0",))
    with pytest.raises(NotRecordable, match="end with NUL"):
        GoldenDraft(InferRequest(model="m", inputs=(ends,)), config(Datatype.BYTES))


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ([[1, 2], [1, 2]], (1e-4, 1e-6)),
        ([[1.0, 1.0], [1.0, 1.001], [1.0, 0.999]], (0.008, 1e-6)),
        ([[100.0, 0.001], [100.0, 0.003]], (1e-4, 0.008)),
        ([[NAN, 1.0], [NAN, 1.0]], (1e-4, 1e-6)),
        ([[float("inf"), 1.0], [float("inf"), 1.0]], (1e-4, 1e-6)),
        ([[], []], (1e-4, 1e-6)),
        ([[0.0], [1e-7]], (1e-4, 1e-6)),
    ],
    ids=["equal", "large", "near zero", "nan", "inf", "empty", "below the default"],
)
def test_tolerances_are_four_times_the_largest_spread_and_at_least_the_defaults(
    arrays: list[list[float]], expected: tuple[float, float]
) -> None:
    found = tolerances([np.array(each, np.float64) for each in arrays], 1e-4, 1e-6)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    "arrays",
    [
        [[1.0], [2.0]],
        [[1.0, 0.0], [1.0, 0.9]],
        [[NAN], [1.0]],
        [[float("inf")], [1.0]],
        [[float("inf")], [-float("inf")]],
    ],
    ids=["large", "near zero", "nan", "inf", "signs of inf"],
)
def test_no_tolerance_is_made_that_checks_nothing(arrays: list[list[float]]) -> None:
    with pytest.raises(NotRecordable):
        tolerances([np.array(each) for each in arrays], 1e-4, 1e-6)


async def test_floats_pass_at_the_largest_spread_and_fail_beyond_the_tolerance() -> None:
    def of(*values: float) -> GoldenAnswer:
        return answered(array_tensor("y", Datatype.FP32, np.array(values, np.float32)))

    draft = GoldenDraft(
        InferRequest(model="m", inputs=(tensor("x", Datatype.FP32, 2),)), config(Datatype.FP32)
    )
    members, expected = completed(draft, [of(1, NAN), of(1.01, NAN)])
    assert members["outputs"]["y"]["nan"] is True
    await expected.check(of(1.01, NAN), similarity)
    await expected.check(of(0.97, NAN), similarity)
    with pytest.raises(Exception, match="2 elements differ"):
        await expected.check(of(1.05, NAN), similarity)


LONG = "The capital of France is "


@pytest.mark.parametrize(
    ("answers", "check"),
    [
        (["Paris"] * 4, {"equals": "Paris"}),
        ([f"{LONG}Paris", f"{LONG}Paris, of course"], {"prefix": f"{LONG}Paris"}),
        ([""] * 4, {"equals": ""}),
    ],
    ids=["equal", "prefix", "empty"],
)
async def test_equal_texts_are_expected_as_a_whole_and_others_by_what_they_have_in_common(
    answers: list[str], check: Mapping[str, str]
) -> None:
    members, expected = completed(GoldenDraft(text_request(), TEXT), texts(*answers))
    assert members == {"text": check}
    for each in texts(*answers):
        await expected.check(each, similarity)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (texts("Paris is", "Lyon is"), "output 'text_output' differs"),
        (texts("x" * 19 + "a", "x" * 19 + "b"), "output 'text_output' differs"),
        ([GoldenAnswer()], "has no output"),
    ],
    ids=["different", "19 characters", "none"],
)
def test_an_answer_without_a_check_is_dropped_by_the_name_of_its_output(
    answers: list[GoldenAnswer], reason: str
) -> None:
    with pytest.raises(NotRecordable, match=reason):
        GoldenDraft(text_request(), TEXT).complete(answers, {}, 0.1)


def test_the_output_that_differs_is_left_out_and_the_others_are_expected() -> None:
    more = replace(
        TEXT,
        output=(*TEXT.output, ModelOutput(name="y", data_type=DataType.TYPE_INT32, dims=(1,))),
    )

    def of(number: int) -> GoldenAnswer:
        y = array_tensor("y", Datatype.INT32, np.array([number], np.int32))
        return answered(text_tensor("text_output", ["Paris"]), y, finish="stop")

    members, _ = completed(GoldenDraft(text_request(), more), [of(1), of(2)])
    assert members == {"text": {"equals": "Paris"}, "finish_reason": ["stop"]}


def test_labels_of_a_batch_are_expected_one_by_one() -> None:
    answers = [answered(text_tensor("y", ["cat", "dog"])) for _ in range(2)]
    asked = InferRequest(model="m", inputs=(text_tensor("x", ["1", "2"]),))
    members, _ = completed(GoldenDraft(asked, config(Datatype.BYTES)), answers)
    assert members == {"outputs": {"y": {"equals": ["cat", "dog"]}}}


def test_a_slow_model_gets_four_times_its_longest_time() -> None:
    draft = GoldenDraft(text_request(), TEXT)
    draft.complete(texts("Paris"), {}, 5.0)
    assert draft.members["secs"] == 20.0
    quick = GoldenDraft(text_request(), TEXT)
    quick.complete(texts("Paris"), {}, 0.1)
    assert "secs" not in quick.members


def chat(endpoint: Endpoint = Endpoint.CHAT, **members: Any) -> InferRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "Capital?"}], **members}
    tensors = request_tensors(RequestBody(json.dumps(body).encode()), endpoint, CHAT)
    return InferRequest(model="text", inputs=tensors)


def completion(text: str, finish: str = "stop") -> GoldenAnswer:
    choice = {"message": {"content": text}, "finish_reason": finish}
    body = json.dumps({"id": text, "choices": [choice]})
    return answered(text_tensor(RESPONSE, [body]))


async def test_a_chat_is_asked_as_one_answer_and_expected_by_its_content() -> None:
    asked = chat(stream=True, stream_options={"include_usage": True}, temperature=0)
    draft = GoldenDraft(asked, CHAT)
    assert draft.changed
    assert draft.members["request"]["chat"] == {
        "messages": [{"role": "user", "content": "Capital?"}],
        "temperature": 0,
    }
    answers = [completion("Paris"), completion("Paris", "length")]
    members, expected = completed(draft, answers)
    assert members == {"text": {"equals": "Paris"}, "finish_reason": ["length", "stop"]}
    await expected.check(answers[1], similarity)
    assert b"stream" not in draft.request().inputs[0].elements()[0]
    assert not GoldenDraft(chat(), CHAT).changed


def test_other_endpoints_of_openai_are_dropped_by_name() -> None:
    with pytest.raises(NotRecordable, match="endpoint 'embeddings'"):
        GoldenDraft(chat(Endpoint.EMBEDDINGS), CHAT)


def test_a_chat_without_a_completion_is_dropped() -> None:
    with pytest.raises(NotRecordable, match="answered with no chat completion"):
        GoldenDraft(chat(), CHAT).complete([answered(text_tensor(RESPONSE, ["{}"]))], {}, 0.1)


@pytest.mark.parametrize(
    ("draft", "found"),
    [
        (lambda: GoldenDraft(text_request("I am Ann"), TEXT), ["I am Ann"]),
        (lambda: GoldenDraft(chat(user="Ann"), CHAT), ["user", "Capital?", "Ann"]),
        (
            lambda: GoldenDraft(text_request("a", parameters={"p": "Ann", "n": 1}), TEXT),
            ["Ann", "a"],
        ),
    ],
    ids=["text", "chat", "parameters"],
)
def test_every_text_of_a_client_is_redacted_and_its_own_answer_is_not_used(
    draft: Callable[[], GoldenDraft], found: list[str]
) -> None:
    made = draft()
    assert made.texts() == found
    made.redact(found)
    assert not made.changed
    made.redact([each.replace("Ann", "[redacted]") for each in found])
    assert made.changed
    assert "Ann" not in json.dumps(made.members)
    assert b"Ann" not in b"".join(e for i in made.request().inputs for e in i.elements())


@pytest.mark.parametrize(
    ("answer", "check"),
    [
        (f"{LONG}Paris, Ann.", {"prefix": f"{LONG}Paris, "}),
        ("Hello Ann", "has a text to redact"),
    ],
    ids=["behind a prefix", "near the start"],
)
def test_no_text_to_redact_is_expected_of_an_answer(
    answer: str, check: Mapping[str, str] | str
) -> None:
    draft, answers = GoldenDraft(text_request(), TEXT), texts(answer, answer)
    assert draft.answer_texts(answers) == [answer]
    clean = {answer: answer.replace("Ann", "[redacted]")}
    if isinstance(check, str):
        with pytest.raises(NotRecordable, match=check):
            draft.complete(answers, clean, 0.1)
        return
    assert completed(draft, answers, clean)[0] == {"text": check}


def test_equal_requests_have_equal_digests_also_with_long_arrays() -> None:
    def digest(last: float) -> bytes:
        array = np.arange(3000, dtype=np.float32)
        array[-1] = last
        asked = InferRequest(model="m", inputs=(array_tensor("x", Datatype.FP32, array),))
        return GoldenDraft(asked, config(Datatype.FP32)).digest()

    assert digest(1) == digest(1) != digest(2)


def test_a_request_that_no_file_can_have_is_dropped_without_its_values() -> None:
    draft = GoldenDraft(text_request(parameters={"nested": ["secret"]}), TEXT)
    with pytest.raises(NotRecordable) as caught:
        draft.request()
    assert str(caught.value) == "cannot be a golden request: request.parameters.nested"
    endless = GoldenDraft(text_request(parameters={"p": NAN}), TEXT)
    with pytest.raises(NotRecordable):
        endless.request()
