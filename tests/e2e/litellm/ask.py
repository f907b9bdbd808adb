"""Answers that litellm gets from a server, as JSON; it runs in an environment that has litellm.

The arguments are the server's URL, a model, the messages of a question as JSON, and the beginning
of a text.
"""

import json
import sys
from typing import Any

import litellm


def main(url: str, model: str, question: str, beginning: str) -> None:
    """Ask in every way, and print what came of it."""
    openai = {"api_base": f"{url}/v1", "api_key": "none"}
    greedy = {"max_tokens": 16, "temperature": 0}
    triton = {
        **greedy,
        "messages": [{"role": "user", "content": beginning}],
        "model": f"triton/{model}",
        "api_base": f"{url}/v2/models/{model}/generate",
        "allowed_openai_params": ["temperature"],
    }
    asked = {**greedy, **openai, "model": f"openai/{model}", "messages": json.loads(question)}
    usage = {"stream_options": {"include_usage": True}}
    begun = {**greedy, **openai, "model": f"text-completion-openai/{model}", "prompt": beginning}
    found = {
        "whole": _answer(litellm.completion(**asked)),
        "streamed": _streamed(litellm.completion(**asked, stream=True, **usage)),
        "completed": _completed(**begun),
        "refused": _refusal(**{**asked, "model": "openai/nowhere"}),
        "triton": _answer(litellm.completion(**triton))["text"],
        "triton_streamed": _streamed(litellm.completion(**triton, stream=True))["text"],
    }
    sys.stdout.write(json.dumps(found))


def _answer(answered: Any) -> dict[str, Any]:
    (choice,) = answered.choices
    return {
        "text": choice.message.content,
        "reason": choice.finish_reason,
        "tokens": answered.usage.completion_tokens,
    }


def _streamed(chunks: Any) -> dict[str, Any]:
    chunks = list(chunks)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    return {
        "text": "".join(choice.delta.content or "" for choice in choices),
        "reason": [choice.finish_reason for choice in choices if choice.finish_reason][-1],
        "tokens": usages[-1].completion_tokens if usages else None,
        "chunks": len(chunks),
    }


def _completed(**asked: Any) -> str:
    text: str = litellm.text_completion(**asked).choices[0].text
    return text


def _refusal(**asked: Any) -> dict[str, Any]:
    try:
        litellm.completion(**asked)
    except litellm.NotFoundError as error:
        return {"kind": type(error).__name__, "status": error.status_code, "says": str(error)}
    raise SystemExit("a model that is not there has answered")


main(*sys.argv[1:])
