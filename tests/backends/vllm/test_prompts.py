"""Short prompts are rendered on the event loop, others in threads, with the same result."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.backends.vllm.conftest import Llama, ask, engine_marks, openai

pytestmark = engine_marks

HI = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SHORT_CHARS, SHORT_MESSAGES, TURN_CHARS = 512, 16, 4096
CHATS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "short": ({"messages": [HI]}, []),
    "a flag of the template": (
        {"messages": [HI], "chat_template_kwargs": {"enable_thinking": False}},
        [],
    ),
    "messages that are short together": ({"messages": [HI] * SHORT_MESSAGES}, ["tokenize"]),
    "many messages": ({"messages": [HI] * (SHORT_MESSAGES + 1)}, ["template", "tokenize"]),
    "a long message": (
        {"messages": [{"role": "user", "content": "x" * (SHORT_CHARS + 1)}]},
        ["template", "tokenize"],
    ),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, []),
    "tools": ({"messages": [HI], "tools": [TOOL]}, ["template"]),
    "a long role": (
        {"messages": [HI, {"role": "x" * SHORT_CHARS, "content": "x"}]},
        ["template", "tokenize"],
    ),
    "a structure for the template": (
        {"messages": [HI], "chat_template_kwargs": {"found": ["x"]}},
        ["template"],
    ),
    "many options of the template": (
        {
            "messages": [HI],
            "chat_template_kwargs": dict.fromkeys(map("o{}".format, range(17)), True),
        },
        ["template"],
    ),
}
"""Bodies of chats, and which of their steps take a thread."""


@pytest.fixture
def in_threads(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps of the engine's renderer in its threads."""
    found, executor = list[str](), llama.llm.renderer._executor  # noqa: SLF001 - vLLM's
    submit = executor.submit

    def noted(call: Any) -> Any:
        found.append("tokenize" if "tokenize" in call.func.__name__ else "template")
        return submit(call)

    monkeypatch.setattr(executor, "submit", noted)
    return found


@pytest.mark.parametrize(("members", "wanted"), CHATS.values(), ids=CHATS)
async def test_a_chat_takes_threads_only_where_it_is_not_short(
    llama: Llama, in_threads: list[str], members: dict[str, Any], wanted: list[str]
) -> None:
    body = {**members, "max_tokens": 1, "temperature": 0}
    await llama.whole(openai(body, "chat/completions"))
    assert in_threads == wanted


@pytest.mark.parametrize(("chars", "wanted"), [(SHORT_CHARS, []), (SHORT_CHARS + 1, ["tokenize"])])
async def test_a_text_takes_a_thread_above_the_limit(
    llama: Llama, in_threads: list[str], chars: int, wanted: list[str]
) -> None:
    await llama.say(ask("x " * (chars // 2) + "y" * (chars % 2), max_tokens=1))
    assert in_threads == wanted


async def test_few_of_many_short_texts_are_tokenized_in_one_turn(
    llama: Llama, in_threads: list[str]
) -> None:
    body = {"prompt": ["x" * (SHORT_CHARS // 2)] * 40, "max_tokens": 1}
    await llama.whole(openai(body, "completions"))
    assert in_threads == ["tokenize"] * (40 - TURN_CHARS // (SHORT_CHARS // 2))


@pytest.mark.parametrize("words", [1, 20, 100, 300])
async def test_a_prompt_has_the_same_tokens_in_either_place(llama: Llama, words: int) -> None:
    """Those of vLLM's function without a thread, which the engine counts."""
    renderer, text = llama.llm.renderer, "Hi you " * words
    (expected,) = renderer.render_cmpl([{"prompt": text}])
    answer = await llama.whole(openai({"prompt": text, "max_tokens": 1}, "completions"))
    assert answer["usage"]["prompt_tokens"] == len(expected["prompt_token_ids"])


class Renderer:
    """Stands for a renderer; its tokenizer refuses each prompt."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def get_eos_token_id(self) -> int:
        return 2

    def _tokenize_prompt(self, prompt: Any, parameters: Any) -> Any:
        raise ValueError("no such text")

    async def _tokenize_prompt_async(self, prompt: Any, parameters: Any) -> str:
        return "in a thread"


def rendered(renderer: Renderer) -> Any:
    """The result of the renderer's function for a short prompt."""
    from backends.vllm.prompts import render_short_in_place

    render_short_in_place(renderer, None)
    return renderer._tokenize_prompt_async({"prompt": "x"}, None)  # noqa: SLF001 - vLLM's


def of_pool() -> Renderer:
    """A renderer with a tokenizer that several threads may use."""
    from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin

    class Pool(ThreadSafeHFTokenizerMixin):
        is_fast = True

    return Renderer(Pool())


async def test_an_error_of_a_short_prompt_is_raised(store: Any) -> None:
    with pytest.raises(ValueError, match="no such text"):
        rendered(of_pool())


async def test_another_load_of_an_engine_has_no_budget_of_its_own(store: Any) -> None:
    from backends.vllm.prompts import render_short_in_place

    renderer = of_pool()
    render_short_in_place(renderer, None)
    first = renderer._tokenize_prompt_async  # noqa: SLF001 - vLLM's
    render_short_in_place(renderer, None)
    assert renderer._tokenize_prompt_async == first  # noqa: SLF001 - vLLM's


@pytest.mark.parametrize("tokenizer", [None, SimpleNamespace(is_fast=True)])
async def test_a_tokenizer_that_one_thread_may_use_stays_there(store: Any, tokenizer: Any) -> None:
    assert await rendered(Renderer(tokenizer)) == "in a thread"
