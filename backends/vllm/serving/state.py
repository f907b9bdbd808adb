"""How do vLLM's handlers of OpenAI's requests come to be, over an engine that runs already?"""

import asyncio
from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.reasoning.abs_reasoning_parsers import ReasoningParserManager
from vllm.renderers import ChatParams
from vllm.tool_parsers.abstract_tool_parser import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from backends.vllm.lora import Adapter
from backends.vllm.openai_settings import REASONING_PARSER, TOOL_CALL_PARSER, OpenAiSettings
from backends.vllm.settings import EngineModel
from gateway.errors import Code, InferenceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What an engine serves: the model's names, the adapters it has loaded, its settings."""

    names: Sequence[str]
    adapters: Sequence[Adapter]
    settings: OpenAiSettings


def check_parsers(model: EngineModel) -> None:
    """Refuse parsers that vLLM does not have, before its engine starts."""
    tools = model.openai.tool_call_parser
    _check(model.name, TOOL_CALL_PARSER, tools, ToolParserManager.list_registered())
    reasoning = str(model.arguments.get(REASONING_PARSER) or "")
    _check(model.name, REASONING_PARSER, reasoning, ReasoningParserManager.list_registered())


def _check(model: str, setting: str, name: str, known: Collection[str]) -> None:
    if name and name not in known:
        near = get_close_matches(name, known, n=3) or sorted(known)
        raise InferenceError(
            Code.INVALID_ARG,
            f"model '{model}': its {setting} is '{name}', which vLLM does not know; expected one "
            f"such as {', '.join(map(repr, near))}",
        )


async def handlers(engine: Any, served: Served, tasks: Sequence[str]) -> Any:
    """The state of vLLM's own server, which has its handlers as attributes.

    Its routes and its application are never made.
    """
    state = SimpleNamespace()
    arguments = await asyncio.to_thread(_prepare, engine, served)
    await init_app_state(engine, state, arguments, tuple(tasks))
    responses = getattr(state, "openai_serving_responses", None)
    if responses is not None:
        # It never forgets what it stores.
        responses.enable_store = False
    return state


def _prepare(engine: Any, served: Served) -> Namespace:
    """The arguments; what takes long to make for conversations vLLM then finds in its caches."""
    template = served.settings.chat_template
    engine.renderer.warmup(ChatParams(template, chat_template_content_format="auto"))
    return _arguments(engine, served)


def _arguments(engine: Any, served: Served) -> Namespace:
    """As `vllm serve` would have parsed them."""
    settings = served.settings
    arguments: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    arguments.model = served.names[0]
    arguments.served_model_name = list(served.names)
    arguments.enable_log_requests = engine.log_requests
    arguments.structured_outputs_config = engine.vllm_config.structured_outputs_config
    # In the order of their numbers, so that vLLM gives each the number it is loaded with.
    arguments.lora_modules = [LoRAModulePath(each.name, each.path) for each in served.adapters]
    arguments.chat_template = settings.chat_template
    arguments.trust_request_chat_template = settings.trust_request_chat_template
    arguments.tool_call_parser = settings.tool_call_parser or None
    arguments.enable_auto_tool_choice = bool(settings.tool_call_parser)
    arguments.log_error_stack = False
    return arguments
