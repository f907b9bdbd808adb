"""Texts that are looked up are those that the stream of `tokenizers` decodes."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from backends.vllm.token_texts import TokenTexts, token_texts

SPECIAL, ADDED = "<|end|>", "<tag>"
MERGED = ("Ġa", "ĠÃ", "Ã©", "ĠÃ©", "ðŁ", "ðŁĺ", "Ģ", "ï¿½", "aĠ")
"""Tokens of more than a byte: whole characters, parts of one, and a whole one before a part."""


def tokenizer(decoder: decoders.Decoder) -> Tokenizer:
    """Byte-level BPE with a token for each byte."""
    names = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *MERGED])
    found = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, []))
    found.decoder = decoder
    found.add_special_tokens([AddedToken(SPECIAL)])
    found.add_tokens([AddedToken(ADDED)])
    return found


@pytest.fixture
def byte_level() -> Tokenizer:
    return tokenizer(decoders.ByteLevel())


@pytest.fixture
def texts(byte_level: Tokenizer) -> TokenTexts:
    found = token_texts(byte_level)
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(200))
def test_texts_are_those_of_a_stream(byte_level: Tokenizer, texts: TokenTexts, seed: int) -> None:
    """A stream that sees only the other tokens decodes those as one that sees all.

    Now and then the stream gets a token whose text could be looked up.
    """
    chance = random.Random(seed)
    prompt, *tokens = chance.choices(range(byte_level.get_vocab_size()), k=121)
    options = {"ids": [prompt], "skip_special_tokens": chance.random() < 0.5}
    every, others = decoders.DecodeStream(**options), decoders.DecodeStream(**options)
    at_character_end = False
    looked_up = 0
    for token in tokens:
        is_looked_up = at_character_end and chance.random() < 0.9
        text = texts[token] if is_looked_up else ""
        looked_up += bool(text)
        if not text:
            text = others.step(byte_level, token) or ""
            at_character_end = bool(text)
        assert text == (every.step(byte_level, token) or "")
    assert looked_up > 3


@pytest.mark.parametrize(
    ("name", "text"),
    [("a", "a"), ("Ġa", " a"), ("Ã©", "é"), ("ĠÃ", ""), ("ðŁĺ", ""), ("Ģ", ""), ("ï¿½", "")],
)
def test_a_token_of_whole_characters_has_a_text(
    byte_level: Tokenizer, texts: TokenTexts, name: str, text: str
) -> None:
    assert texts[byte_level.token_to_id(name)] == text


@pytest.mark.parametrize("name", [SPECIAL, ADDED])
def test_an_added_token_has_none(byte_level: Tokenizer, texts: TokenTexts, name: str) -> None:
    assert texts[byte_level.token_to_id(name)] == ""


@pytest.mark.parametrize("number", [-1, 1 << 20, 1 << 40])
def test_a_number_of_no_token_has_none(texts: TokenTexts, number: int) -> None:
    assert texts[number] == ""


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    ],
    ids=repr,
)
def test_other_decoders_have_none(decoder: decoders.Decoder) -> None:
    assert token_texts(tokenizer(decoder)) is None
