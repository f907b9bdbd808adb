"""vLLM's counter of its tool parsers' invocations, kept for one model.

vLLM counts in the registry of the process, under the name of the model that was loaded last.
"""

from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser.abstract_parser import DelegatingParser

NAME = "vllm:tool_call_parser_invocations_total"
STREAMING, WHOLE = "streaming", "non_streaming"
CALLED, NOT_CALLED = "tool_call", "no_tool_call"
REQUESTS = {ChatCompletionRequest: "chat_completions", ResponsesRequest: "responses"}
OTHER = "other"


class ToolCallCounter:
    """The series `vllm:tool_call_parser_invocations_total` of one model, with vLLM's labels.

    A parser that fails counts as one that found no call, as in vLLM.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name = model_name
        self._counter = Counter(
            NAME,
            "Total number of ToolParser invocations. Non-streaming increments once per choice; "
            "streaming increments once per delta.",
            ["model_name", "mode", "outcome", "request_type"],
            registry=registry,
        )
        for labels in product(
            (STREAMING, WHOLE), (CALLED, NOT_CALLED), (*REQUESTS.values(), OTHER)
        ):
            self._counter.labels(model_name, *labels)

    def counted(self, parser: type) -> type:
        """The class of that parser, whose invocations are counted here as vLLM counts them."""
        # vLLM counts in the methods of this class alone.
        methods = {
            name: counting
            for name, counting in (
                ("extract_tool_calls", self._whole(parser)),
                ("extract_tool_calls_streaming", self._streaming(parser)),
            )
            if getattr(parser, name, None) is getattr(DelegatingParser, name)
        }
        return type(parser.__name__, (parser,), methods)

    def _whole(self, parser: Any) -> Any:
        def extract_tool_calls(own: Any, model_output: str, request: Any) -> Any:
            called = False
            try:
                found = parser.extract_tool_calls(own, model_output, request)
                called = bool(found.tools_called)
            finally:
                self._count(WHOLE, own, request, called=called)
            return found

        return extract_tool_calls

    def _streaming(self, parser: Any) -> Any:
        def extract_tool_calls_streaming(own: Any, *texts_and_request: Any) -> Any:
            called = False
            try:
                found = parser.extract_tool_calls_streaming(own, *texts_and_request)
                called = bool(found and found.tool_calls)
            finally:
                self._count(STREAMING, own, texts_and_request[-1], called=called)
            return found

        return extract_tool_calls_streaming

    def _count(self, mode: str, parser: Any, request: object, *, called: bool) -> None:
        if parser.tool_parser is None:
            return
        kind = REQUESTS.get(type(request), OTHER)
        self._counter.labels(self._model_name, mode, CALLED if called else NOT_CALLED, kind).inc()
