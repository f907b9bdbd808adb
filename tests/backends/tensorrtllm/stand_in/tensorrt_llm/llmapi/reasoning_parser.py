"""Thoughts stand before their end, from the first word on, as with `deepseek-r1`."""

from dataclasses import dataclass
from typing import ClassVar

END = "</think>"


@dataclass
class ReasoningParserResult:
    content: str = ""
    reasoning_content: str = ""


class DeepSeekR1Parser:
    needs_raw_special_tokens = True

    def __init__(self) -> None:
        self._thinks = True
        self._held = ""

    def parse(self, text: str) -> ReasoningParserResult:
        thoughts, _, content = text.partition(END)
        return ReasoningParserResult(content, thoughts)

    def parse_delta(self, delta_text: str) -> ReasoningParserResult:
        if not self._thinks:
            return ReasoningParserResult(delta_text)
        text = self._held + delta_text
        thoughts, end, content = text.partition(END)
        self._thinks, self._held = not end, ""
        return ReasoningParserResult(content, thoughts)


class ReasoningParserFactory:
    parsers: ClassVar[dict[str, type]] = {"deepseek-r1": DeepSeekR1Parser}

    @staticmethod
    def create_reasoning_parser(reasoning_parser: str) -> DeepSeekR1Parser:
        try:
            return ReasoningParserFactory.parsers[reasoning_parser.lower()]()
        except KeyError as e:
            raise ValueError(f"Invalid reasoning parser: {reasoning_parser}") from e
