"""A load that fails in the engine names the engine's own last error."""

import pytest

from backends.vllm.failures import EngineErrors
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
