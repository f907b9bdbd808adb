"""The constant parts of the chunks of one stream, taken from a chunk that vLLM's handler made."""

from typing import Any

import orjson
from vllm.parser.abstract_parser import DelegatingParser

from backends.vllm.serving.endpoints import EndpointService

PARSER = "parser_cls"
"""The attribute of vLLM's handler of conversations with the class of its parser, None for none."""
UNFINISHED = b'"finish_reason":null'


class ChunkTemplate:
    """Makes chunks as the handler does, for deltas that add nothing but a text.

    `member` are the bytes before the text. `skips_empty`: a delta without text has no chunk.
    """

    __slots__ = ("_after", "_before", "_member", "skips_empty")

    def __init__(self, member: bytes, *, skips_empty: bool) -> None:
        self._member = member
        self._before = self._after = b""
        self.skips_empty = skips_empty

    def learn(self, chunk: bytes, text: str) -> bool:
        """Take the constant parts from the handler's chunk of a text; False if it has others."""
        before, found, after = chunk.partition(self._member + orjson.dumps(text))
        if not found or UNFINISHED not in after:
            return False
        self._before, self._after = before + self._member, after
        return True

    def chunk(self, text: str) -> bytes:
        """The chunk of a delta."""
        return self._before + orjson.dumps(text) + self._after


def chunk_template(service: EndpointService, handler: Any, body: Any) -> ChunkTemplate | None:
    """A template for the stream of a request; None if its chunks differ in more than a text."""
    if not service.text_member or not body.stream or _asks_for_more(handler, body):
        return None
    parser = getattr(handler, PARSER, None)
    if parser is not None and not _keeps_text(parser, body):
        return None
    return ChunkTemplate(service.text_member, skips_empty=parser is not None)


def _asks_for_more(handler: Any, body: Any) -> bool:
    """Whether chunks have more than a text: of several sequences, or with tokens or usage."""
    options = body.stream_options
    return bool(
        (body.n or 1) > 1
        or body.logprobs not in (None, False)
        or body.return_token_ids
        or body.use_beam_search
        or handler.enable_force_include_usage
        or (options is not None and options.continuous_usage_stats)
    )


def _keeps_text(parser: Any, body: Any) -> bool:
    """Whether a parser leaves the texts of a conversation as they are.

    vLLM's parser of tool calls does, if no tool may be called; an empty text has no chunk then.
    """
    return (
        body.tool_choice == "none"
        and parser.parse_delta is DelegatingParser.parse_delta
        and parser.reasoning_parser_cls is None
        and not parser.tool_parser_cls.engine_based_streaming
    )
