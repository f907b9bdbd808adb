"""Texts of single tokens, for tokenizers whose decoder joins the bytes of tokens."""

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

INCOMPLETE = "\ufffd"
"""Stands for bytes that are no character, among them those of a part of one."""


class TokenTexts(dict[int, str]):
    """The text that a token adds behind complete characters; "" where only a decoder has it.

    A text is decoded once, when it is first asked for. Tokens with a part of a character, those
    added to the vocabulary, such as special ones, and numbers of no token have none here.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._decode = tokenizer.decode
        self._added = frozenset(tokenizer.get_added_tokens_decoder())

    def __missing__(self, token: int) -> str:
        try:
            text = "" if token in self._added else self._decode([token])
        except OverflowError:
            return ""  # no number of a token: vLLM logs it
        self[token] = found = "" if INCOMPLETE in text else text
        return found


def token_texts(tokenizer: Tokenizer) -> TokenTexts | None:
    """The texts of its tokens; None if the text of a token depends on the tokens before it.

    The decoder of byte-level BPE joins the bytes of all tokens; others also remove or add spaces.
    """
    return TokenTexts(tokenizer) if isinstance(tokenizer.decoder, ByteLevel) else None
