"""Look-up of models by name and endpoint."""

from dataclasses import replace

import pytest

from gateway.errors import Code, InferenceError
from gateway.frontends.http.openai.request import ServedModels, serves
from gateway.models.model import Model
from gateway.openai_contract import Endpoint, OpenAiRefusal
from tests.builders import TEXT, LoadedModels, ScriptedInstance, soon
from tests.conftest import Serve
from tests.gateway.frontends.http.openai.conftest import CHAT, CHAT_ONLY, ENCODER, dataplane_of

NAMED = replace(CHAT, name="named", parameters={"openai_names": '["formal", "org/rude", "chat"]'})


@pytest.fixture
async def every(serve: Serve) -> ServedModels:
    """The door's view of one model of each kind."""
    configs = (CHAT, CHAT_ONLY, ENCODER, NAMED, TEXT)
    models = [serve(ScriptedInstance(None), config=config) for config in configs]
    return ServedModels(dataplane_of(*models))


def refusal(models: ServedModels, name: str, endpoint: Endpoint) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        models.find(name, endpoint)
    return caught.value


@pytest.mark.parametrize("endpoint", Endpoint)
def test_a_model_with_the_contract_serves_every_endpoint(endpoint: Endpoint) -> None:
    assert serves(CHAT, endpoint)
    assert serves(CHAT_ONLY, endpoint) == (endpoint is Endpoint.CHAT)
    assert serves(ENCODER, endpoint) == (endpoint is Endpoint.EMBEDDINGS)
    assert not serves(TEXT, endpoint)


@pytest.mark.parametrize(
    ("name", "found"), [("chat", "chat"), ("formal", "named"), ("org/rude", "named")]
)
async def test_a_model_is_found_by_its_own_name_then_by_further_ones(
    every: ServedModels, name: str, found: str
) -> None:
    assert every.find(name, Endpoint.CHAT).name == found


async def test_an_unknown_model_is_refused_in_vllms_words(every: ServedModels) -> None:
    error = refusal(every, "nope", Endpoint.CHAT)
    assert (error.code, error.message) == (Code.NOT_FOUND, "The model `nope` does not exist.")
    assert isinstance(error, OpenAiRefusal)
    assert b'"param":"model"' in error.body


@pytest.mark.parametrize(
    ("name", "endpoint", "lacks"),
    [
        ("text", Endpoint.CHAT, "lacks the input 'openai_request' or the output 'openai_response'"),
        ("text", Endpoint.EMBEDDINGS, "exactly one required input, BYTES with one element"),
        ("encoder", Endpoint.CHAT, "lacks the input 'openai_request'"),
        ("chat_only", Endpoint.COMPLETIONS, "lacks the input 'openai_endpoint'"),
    ],
)
async def test_a_model_without_the_endpoint_is_refused_with_the_reason(
    every: ServedModels, name: str, endpoint: Endpoint, lacks: str
) -> None:
    error = refusal(every, name, endpoint)
    assert error.code is Code.INVALID_ARG
    assert f"The model `{name}` does not serve {endpoint}" in error.message
    assert lacks in error.message


async def test_without_a_name_the_only_model_is_meant(serve: Serve) -> None:
    chat_only, encoder = (
        serve(ScriptedInstance(None), config=config) for config in (CHAT_ONLY, ENCODER)
    )
    models = ServedModels(dataplane_of(chat_only, encoder))
    assert models.find("", Endpoint.CHAT) is chat_only
    assert models.find("", Endpoint.EMBEDDINGS) is encoder
    assert refusal(models, "", Endpoint.SCORE).message.endswith("serves score: none")


async def test_without_a_name_several_models_are_too_many(every: ServedModels) -> None:
    error = refusal(every, "", Endpoint.CHAT)
    assert error.code is Code.INVALID_ARG
    assert "`model` is missing" in error.message
    assert error.message.endswith("chat, chat_only, named")


async def test_the_only_model_is_meant_while_it_is_started_again(serve: Serve) -> None:
    model = serve(config=CHAT)
    assert not model.ready
    assert ServedModels(dataplane_of(model)).find("", Endpoint.CHAT) is model


class Loading(LoadedModels):
    """A registry in which every other model is still being loaded."""

    def find(self, name: str, version: str) -> Model:
        try:
            return super().find(name, version)
        except InferenceError:
            raise InferenceError(Code.UNAVAILABLE, f"'{name}' is still loading") from None


async def test_a_model_that_is_being_loaded_is_unavailable(serve: Serve) -> None:
    dataplane = dataplane_of()
    loading = Loading(serve(ScriptedInstance(None), config=NAMED))
    models = ServedModels(type(dataplane)(loading))  # type: ignore[arg-type] # as dataplane_of
    assert refusal(models, "late", Endpoint.CHAT).code is Code.UNAVAILABLE
    assert models.find("formal", Endpoint.CHAT).name == "named"


async def test_an_ambiguous_name_is_refused_as_everywhere(serve: Serve) -> None:
    class Ambiguous(LoadedModels):
        def find(self, name: str, version: str) -> Model:
            raise InferenceError(Code.INVALID_ARG, "There are 2 identifiers")

    models = ServedModels(type(dataplane_of())(Ambiguous()))  # type: ignore[arg-type]
    assert refusal(models, "twice", Endpoint.CHAT).message == "There are 2 identifiers"


async def test_only_models_that_serve_an_endpoint_are_listed(every: ServedModels) -> None:
    assert [each.name for each in every] == ["chat", "chat_only", "encoder", "named"]


async def test_a_model_that_has_died_is_not_listed(serve: Serve) -> None:
    instance = ScriptedInstance(None)
    gone: list[str] = []
    config = replace(CHAT, parameters={"restart_tries": "0"})
    model = serve(instance, config=config, on_change=lambda: gone.append("changed"))
    models = ServedModels(dataplane_of(model))
    assert [each.name for each in models] == ["chat"]
    instance.die("its engine has stopped")
    await soon(instance.closed.wait())
    assert list(models) == []
