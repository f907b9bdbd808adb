"""Adapters in the real engine."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from backends.vllm.backend import VllmBackend
from gateway.errors import Code, InferenceError
from gateway.openai_contract import OpenAiRefusal
from tests.backends.vllm.adapters import write_adapter
from tests.backends.vllm.conftest import (
    ANSWER,
    CONTEXT,
    QUESTION,
    Llama,
    Write,
    ask,
    engine_marks,
    engine_processes,
    loaded_before,
    openai,
    stops_kept,
)

pytestmark = engine_marks

TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
"""Not the model's own."""
OTHER = "{% for message in messages %}{{ message['content'] }}{% endfor %} Indeed,"
GREEDY = {"max_tokens": 16, "temperature": 0}


@pytest_asyncio.fixture(loop_scope="session")
async def dressed(llama: Llama, write: Write, adapter: str) -> AsyncIterator[Llama]:
    """The same engine behind a config with a chat template, and with one more name."""
    parameters = {
        "chat_template": TEMPLATE,
        "trust_request_chat_template": "true",
        "openai_names": '["alias"]',
    }
    context = write(
        files={"multi_lora.json": {"odd": adapter}}, parameters=parameters, enable_lora="true"
    )
    found = await loaded_before(llama, context)
    yield found
    with stops_kept():
        await found.close()


async def completion(llama: Llama, model: str | None) -> dict[str, Any]:
    asked = {"prompt": QUESTION, **GREEDY} | ({} if model is None else {"model": model})
    found: dict[str, Any] = await llama.whole(openai(asked, "completions"))
    return found


async def test_a_request_chooses_its_adapter(llama: Llama) -> None:
    plain = ask(exclude_input_in_output=True, **GREEDY)
    odd = ask(exclude_input_in_output=True, sampling_parameters={**GREEDY, "lora_name": "odd"})
    assert await llama.say(odd) != ANSWER
    assert await llama.say(plain) == ANSWER
    with pytest.raises(InferenceError) as caught:
        await llama.answers(ask(lora_name="even"))
    assert caught.value.message == "LoRA even is not supported, we currently support ['odd']"


async def test_an_instance_tells_its_adapters_and_its_context(llama: Llama) -> None:
    assert tuple(llama.instance.adapters) == ("odd",)
    assert llama.instance.max_model_len == CONTEXT


async def test_an_adapter_is_a_model_to_openais_clients(llama: Llama) -> None:
    odd = ask(exclude_input_in_output=True, sampling_parameters={**GREEDY, "lora_name": "odd"})
    answer = await completion(llama, "odd")
    assert answer["choices"][0]["text"] == await llama.say(odd) != ANSWER
    assert answer["model"] == "odd"


@pytest.mark.parametrize("model", ["llama", "alias", None])
async def test_every_other_name_is_the_model_itself(dressed: Llama, model: str | None) -> None:
    answer = await completion(dressed, model)
    assert answer["choices"][0]["text"] == ANSWER
    assert answer["model"] == "llama"


async def test_a_name_that_is_none_is_not_found(dressed: Llama) -> None:
    with pytest.raises(OpenAiRefusal, match="The model `even` does not exist") as caught:
        await completion(dressed, "even")
    assert caught.value.status == 404


async def test_every_conversation_has_the_template_of_the_config(dressed: Llama) -> None:
    messages = [{"role": "user", "content": "The sky is"}]
    echoed = await dressed.say(
        ask(None, messages=messages, exclude_input_in_output=False, **GREEDY)
    )
    answer = await dressed.whole(openai({"messages": messages, **GREEDY}))
    assert echoed == "The sky is\n" + answer["choices"][0]["message"]["content"]


async def test_a_trusted_client_may_send_a_template(dressed: Llama) -> None:
    messages = [{"role": "user", "content": "The sky is blue."}]
    body = {"messages": messages, "chat_template": OTHER, "return_prompt_text": True, **GREEDY}
    assert (await dressed.whole(openai(body)))["prompt_text"] == "The sky is blue. Indeed,"


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (
            {"tool_call_parser": "hermez"},
            "'hermez', which vLLM does not know; expected one such as",
        ),
        ({"reasoning_parser": "qwen"}, "its reasoning_parser is 'qwen', which vLLM does not know"),
        ({"chat_template": "nowhere.jinja"}, "the name of a file in its version folder"),
    ],
)
async def test_settings_that_do_not_exist_fail_the_load(
    write: Write, parameters: dict[str, str], said: str
) -> None:
    before = len(engine_processes())
    with pytest.raises(InferenceError) as caught:
        await VllmBackend().load(write(parameters=parameters))
    assert caught.value.code is Code.INVALID_ARG
    assert said in caught.value.message
    assert len(engine_processes()) == before


async def test_an_adapter_that_cannot_be_loaded_fails_the_load_and_stops_the_engine(
    llama: Llama, write: Write, adapter: str, tmp_path: Path
) -> None:
    adapters = {"odd": adapter, "wide": write_adapter(tmp_path / "wide", rank=64)}
    context = write(files={"multi_lora.json": adapters}, enable_lora=True)
    with stops_kept() as stopped, pytest.raises(InferenceError) as caught:
        await loaded_before(llama, context)
    assert "its adapter 'wide' cannot be loaded" in caught.value.message
    assert "rank 64 is greater than max_lora_rank 16" in caught.value.message
    assert str(tmp_path) not in caught.value.message
    assert stopped == [llama.llm]
    await llama.serves_on()
