"""Tokens of texts and chats, and the text of new tokens, byte for byte."""

import codecs
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from sluice_llm.request import Mistake, clean

PROBE = 1 << 15
"""Words of a text that shows whether the tokenizer cuts."""


class TextReader(Protocol):
    """Reads the text of one sequence, a few tokens at a time."""

    def read(self, tokens: Sequence[int], *, final: bool) -> str:
        """The text that these tokens complete; a cut character is U+FFFD at the end."""


class ByteReader:
    """Joins the bytes of tokens."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, tokens: Sequence[int], *, final: bool) -> str:
        return self._decoder.decode(b"".join([self._pieces[each] for each in tokens]), final)


class DecodedReader:
    """Text of a tokenizer that changes the bytes of tokens, by the difference of two decodings.

    Both begin at the last token whose text is known, on which the text of the next may depend.
    """

    def __init__(self, tokenizer: Any, *, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._tokens: list[int] = []
        self._begin = self._end = 0

    def read(self, tokens: Sequence[int], *, final: bool) -> str:
        self._tokens += tokens
        before = self._text(self._tokens[self._begin : self._end])
        after = self._text(self._tokens[self._begin :])
        if len(after) <= len(before) or (after.endswith("\ufffd") and not final):
            return ""
        self._begin, self._end = self._end, len(self._tokens)
        return after[len(before) :]

    def _text(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip))


class Tokens:
    """The tokenizer of one model; `size` is the number of its tokens.

    A text ends at any of `ends`, of which `end` is the first in the model's settings.
    """

    def __init__(self, tokenizer: Any, end: int, others: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self.end = end
        self.ends = frozenset({end, *others})
        vocabulary: Mapping[bytes, int] = tokenizer.get_vocab()
        self.size = max(vocabulary.values()) + 1
        pieces = [b""] * self.size
        for piece, token in vocabulary.items():
            pieces[token] = piece
        every = [[token] for token in range(self.size)]
        shown = tokenizer.decode(every)
        whole = tokenizer.decode(every, skip_special_tokens=False)
        special = [short != full for short, full in zip(shown, whole, strict=True)]
        self._whole = pieces
        self._shown = [b"" if special[token] else piece for token, piece in enumerate(pieces)]
        self.by_bytes = _same(self._shown, shown)
        probed = int(tokenizer.encode("a " * PROBE).input_ids.data.size)
        # That of a GGUF file cuts at 8,192 tokens, with any settings.
        self._most = probed if probed < PROBE else None

    def reader(self, *, skip_special: bool) -> TextReader:
        """A reader for one sequence; special tokens have no text if they are skipped."""
        if not self.by_bytes:
            return DecodedReader(self._tokenizer, skip_special=skip_special)
        return ByteReader(self._shown if skip_special else self._whole)

    def text(self, token: int) -> str:
        """The text of one token, also of a special one."""
        if self.by_bytes:
            return self._whole[token].decode(errors="replace")
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def joined(self, tokens: Sequence[int]) -> str:
        """The text of a prompt."""
        return self.reader(skip_special=True).read(tokens, final=True)

    def of_text(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text; with `special`, also those that the model wants before a prompt."""
        try:
            found = self._tokenizer.encode(text, add_special_tokens=special).input_ids.data
        except Exception as error:  # a tokenizer is foreign code
            raise Mistake(f"the tokenizer fails: {clean(error)}") from error
        if self._most is not None and found.size >= self._most:
            raise Mistake(
                f"the prompt has {self._most} tokens or more, expected at most {self._most - 1}: "
                "the model's tokenizer cuts longer ones"
            )
        return [int(each) for each in found.reshape(-1)]

    def of_chat(self, messages: Sequence[Any], variables: Mapping[str, Any]) -> list[int]:
        """The tokens of messages in the model's template, whose text has its special tokens."""
        rest = dict(variables)
        tools = rest.pop("tools", None)
        generation = bool(rest.pop("add_generation_prompt", True))
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), generation, tools=tools, extra_context=rest or None
            )
        except Exception as error:  # a template is foreign code
            raise Mistake(f"the chat template fails: {clean(error)}") from error
        return self.of_text(text, special=False)


def _same(pieces: Sequence[bytes], texts: Sequence[str]) -> bool:
    """Whether the bytes of tokens are their texts; cut characters have no text of their own."""
    for piece, text in zip(pieces, texts, strict=True):
        try:
            if text and piece.decode() != text:
                return False
        except UnicodeDecodeError:
            continue
    return True
