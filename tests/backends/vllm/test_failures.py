"""A load that fails in the engine names the engine's own last error; no error has paths."""

import json

import pytest

from backends.vllm.failures import EngineErrors, Failures
from backends.vllm.settings import EngineModel
from gateway.errors import Code, InferenceError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

MODEL = EngineModel(
    name="llama", version="1", arguments={}, source="m", local=True, folders={"/store": "the store"}
)


async def test_without_an_error_of_the_engine_the_text_stays() -> None:
    with pytest.raises(InferenceError) as raised, EngineErrors(MODEL):
        raise InferenceError(Code.INTERNAL, "model 'llama': its engine has stopped (exit code -9)")
    assert raised.value.message == (
        "model 'llama': its engine did not start: its engine has stopped (exit code -9)"
    )


async def test_arguments_that_cannot_be_used_are_no_error_of_the_engine() -> None:
    refused = InferenceError(Code.INVALID_ARG, "model 'llama': its adapter cannot be loaded")
    with pytest.raises(InferenceError) as raised, EngineErrors(MODEL):
        raise refused
    assert raised.value is refused


async def test_a_load_that_succeeds_raises_nothing() -> None:
    with EngineErrors(MODEL):
        pass


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ('no "/srv/my llm/x.bin" here', 'no "<path>" here'),
        ("/srv/llm/x.bin: no such file", "<path>: no such file"),
        ("no '/store/x' für sie", "no 'the store/x' für sie"),
    ],
    ids=["quotes", "first", "folder"],
)
def test_an_error_in_a_stream_keeps_its_bytes_but_for_paths(message: str, shown: str) -> None:
    from backends.vllm.serving.refusals import Refusals

    def chunk(text: str) -> str:
        error = {"message": text, "type": "BadRequestError", "param": None, "code": 400}
        return json.dumps({"error": error})

    found = Refusals(Failures("llama", MODEL.folders), MODEL.folders).streamed(chunk(message))
    assert (found.body, found.message, found.status) == (chunk(shown).encode(), shown, 400)
