"""The text of tokens, with a tokenizer whose tokens are letters, bytes or words."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sluice_llm.request import Mistake

from backends.openvino_genai.worker.sluice_openvino_genai.tokens import Tokens

CUT = 40_000
BYTES = {b"<end>": 0, b"a": 1, b"\xc3": 2, b"\xa9": 3, " \u4f60".encode(): 4}
WORDS = {b"<end>": 0, b"\xe2\x96\x81the": 1, b"\xe2\x96\x81cat": 2, b"s": 3}


class Tokenizer:
    """Decodes as the library: special tokens are skipped on demand, cut characters always."""

    def __init__(self, vocabulary: dict[bytes, int], cuts_at: int = CUT) -> None:
        self._pieces = {token: piece for piece, token in vocabulary.items()}
        self._vocabulary, self._cuts_at = vocabulary, cuts_at

    def get_vocab(self) -> dict[bytes, int]:
        return self._vocabulary

    def decode(self, tokens: Sequence[Any], *, skip_special_tokens: bool = True) -> Any:
        if tokens and isinstance(tokens[0], list):
            return [self.decode(each, skip_special_tokens=skip_special_tokens) for each in tokens]
        kept = [t for t in tokens if t or not skip_special_tokens]
        text = b"".join(self._pieces[each] for each in kept).decode(errors="ignore")
        return text.replace("\u2581", " ").lstrip(" ") if b"s" in self._vocabulary else text

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Any:
        count = min(len(text.split()), self._cuts_at)
        return SimpleNamespace(input_ids=SimpleNamespace(data=np.ones((1, count), np.int64)))


def test_bytes_of_tokens_make_whole_characters() -> None:
    tokens = Tokens(Tokenizer(BYTES), end=0)
    assert tokens.by_bytes
    reader = tokens.reader(skip_special=True)
    assert [reader.read([each], final=False) for each in (1, 2, 3, 4, 0)] == [
        *("a", "", "\u00e9", " \u4f60", "")
    ]
    assert reader.read([2], final=True) == "\ufffd"
    assert tokens.reader(skip_special=False).read([1, 0], final=True) == "a<end>"
    assert (tokens.text(0), tokens.text(2)) == ("<end>", "\ufffd")


def test_a_tokenizer_that_changes_bytes_is_asked_for_its_text() -> None:
    tokens = Tokens(Tokenizer(WORDS), end=0)
    assert not tokens.by_bytes
    reader = tokens.reader(skip_special=True)
    pieces = [reader.read([each], final=False) for each in (1, 2, 3, 1)]
    assert "".join(pieces) == "the cats the"
    assert pieces[0] == "the"
    assert reader.read([0], final=True) == ""


def test_a_text_that_the_tokenizer_cuts_is_refused() -> None:
    tokens = Tokens(Tokenizer(BYTES, cuts_at=100), end=0)
    assert len(tokens.of_text("a " * 99)) == 99
    with pytest.raises(Mistake, match="has 100 tokens or more, expected at most 99"):
        tokens.of_text("a " * 100)
    assert len(Tokens(Tokenizer(BYTES), end=0).of_text("a " * 5000)) == 5000
