"""Adapters of a model of replicas: their names at a router, and requests for them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.conformance.models import with_parameters
from tests.rpc import connected, infer_request, streaming
from tests.serving import WAIT_SECS, Serving, replica, serving, static_fleet, write_model
from tests.telling import ADAPTERS_FILE, TELLING, adapted, conversation, told

TOKENS, ODD = 8, "odd"
TEXT = "story:"
MESSAGES = [{"role": "user", "content": TEXT}]
GENERATE = "/v2/models/story/generate"


@pytest.fixture(scope="module")
def host(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("adapters")
    write_model(folder, "story", TELLING + with_parameters({"continue_tries": 1}))
    (folder / "story" / "1" / ADAPTERS_FILE).write_text(json.dumps({ODD: ODD, "even": "even"}))
    with replica(folder, "story", environment=environment) as started:
        yield started


@pytest.fixture(scope="module")
def router(host: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("nothing"), static_fleet(host)) as started:
        yield started
    assert "Traceback" not in started.text + host.text


@pytest.fixture
def client(router: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{router.http}/v1", api_key="none", max_retries=0, timeout=WAIT_SECS
    ) as found:
        yield found


def say(client: Any, model: str, **members: Any) -> Any:
    asked = {"model": model, "messages": MESSAGES, "max_tokens": TOKENS, **members}
    return client.chat.completions.create(**asked)


def test_a_router_lists_the_adapters_of_its_replica_behind_their_model(
    client: openai.OpenAI,
) -> None:
    listed = [model.model_dump() for model in client.models.list()]
    found = [(each["id"], each["parent"]) for each in listed]
    assert found == [("story", None), (ODD, "story"), ("even", "story")]
    assert client.models.retrieve(ODD).id == ODD


def test_a_conversation_with_an_adapter_is_answered_by_it(client: openai.OpenAI) -> None:
    whole = conversation({"messages": MESSAGES})
    for name, adapter in (("story", ""), (ODD, ODD), ("even", "even")):
        chunks = list(say(client, name, stream=True))
        text = "".join(each.choices[0].delta.content or "" for each in chunks)
        assert text == told(adapted(whole, adapter), TOKENS)
    assert len({told(adapted(whole, each), TOKENS) for each in ("", ODD, "even")}) == 3


def test_the_name_of_an_adapter_as_a_parameter_reaches_the_replica_on_both_wires(
    router: Serving,
) -> None:
    for adapter in ("", ODD):
        expected = told(adapted(TEXT, adapter), TOKENS)
        chosen = {"lora_name": adapter} if adapter else {}
        body = {"text_input": TEXT, "max_tokens": TOKENS, "stream": True, **chosen}
        answer = httpx.post(router.http + GENERATE + "_stream", json=body, timeout=WAIT_SECS)
        events = [each for each in answer.text.split("\n\n") if each]
        said = [json.loads(each.removeprefix("data: "))["text_output"] for each in events]
        assert "".join(said) == expected
        request = infer_request("story", text_input=TEXT)
        request.parameters["max_tokens"].int64_param = TOKENS
        for name, value in chosen.items():
            request.parameters[name].string_param = value
        with connected(router.grpc) as stub, streaming(stub) as rpc:
            rpc.ask(request)
            raw = [each.infer_response.raw_output_contents for each in rpc.rest()]
        assert b"".join(each[0][4:] for each in raw if each).decode() == expected


def test_an_unknown_adapter_is_not_found_at_the_router(client: openai.OpenAI) -> None:
    for ask in (lambda: say(client, "none"), lambda: client.models.retrieve("none")):
        with pytest.raises(openai.NotFoundError, match="The model `none` does not exist"):
            ask()
