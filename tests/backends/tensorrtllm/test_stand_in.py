"""The stand-in has the signatures of the library, wherever that is installed."""

import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.backends.tensorrtllm.conftest import STAND_IN

DESCRIBE = f"""
import sys
sys.path[:0] = [{str(STAND_IN.parents[3])!r}, {str(STAND_IN)!r}]
from tests.backends.tensorrtllm.test_stand_in import describe
import json
print(json.dumps(describe()))
"""


def describe() -> dict[str, Any]:
    """The calls and attributes of the package that is imported here."""
    llmapi = importlib.import_module("tensorrt_llm.llmapi")
    executor = importlib.import_module("tensorrt_llm.executor")
    results = importlib.import_module(
        "tensorrt_llm.results" if "stand_in" in str(llmapi.__file__) else "tensorrt_llm.llmapi"
    )
    thoughts = importlib.import_module("tensorrt_llm.llmapi.reasoning_parser")
    protocol = importlib.import_module("tensorrt_llm.serve.openai_protocol")
    calls = importlib.import_module("tensorrt_llm.serve.tool_parser.core_types")
    tools = importlib.import_module("tensorrt_llm.serve.tool_parser.tool_parser_factory")
    generate = inspect.signature(llmapi.LLM.generate_async).parameters
    return {
        "LLM": _names(llmapi.LLM),
        "generate_async": [f"{name}: {each.default!r}" for name, each in generate.items()],
        "SamplingParams": _names(llmapi.SamplingParams),
        "GuidedDecodingParams": _names(llmapi.GuidedDecodingParams),
        "LoRARequest": _names(executor.LoRARequest),
        "CompletionOutput": _names(results.CompletionOutput),
        "RequestError": [each.__name__ for each in executor.RequestError.__mro__],
        "RequestOutput": dir(results.RequestOutput),
        "attributes of LLM": dir(llmapi.LLM),
        "ReasoningParserResult": _names(thoughts.ReasoningParserResult),
        "reasoning parser": dir(
            thoughts.ReasoningParserFactory.create_reasoning_parser("deepseek-r1")
        ),
        "tool parser": dir(tools.ToolParserFactory.create_tool_parser("qwen3")),
        "ToolCallItem": _names(calls.ToolCallItem),
        "StreamingParseResult": _names(calls.StreamingParseResult),
        "ChatCompletionToolsParam": _names(protocol.ChatCompletionToolsParam),
    }


def _names(kind: Any) -> list[str]:
    """The parameters that a caller may name; private names are the library's business."""
    return [name for name in inspect.signature(kind).parameters if not name.startswith("_")]


def described_stand_in() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE], capture_output=True, text=True, check=True, timeout=60
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


USED = {"RequestOutput": {"abort", "__aiter__", "__anext__"}}
"""Classes with other attributes in the stand-in than in the library, if those are used."""
USED["reasoning parser"] = {"parse", "parse_delta"}
USED["tool parser"] = {"detect_and_parse", "parse_streaming_increment"}
USED["attributes of LLM"] = {"generate_async", "get_stats_async", "shutdown"}


def test_the_stand_in_has_all_that_is_used() -> None:
    found = described_stand_in()
    assert "sampling_params: None" in found["generate_async"]
    assert "RuntimeError" in found["RequestError"]
    for name, attributes in USED.items():
        assert attributes <= set(found[name])


@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_llm") is None, reason="tensorrt_llm is not installed"
)
def test_the_library_has_what_the_stand_in_has() -> None:
    real = describe()
    for name, names in described_stand_in().items():
        assert set(USED.get(name, names)) <= set(real[name]), name
