"""Prompts of equal length that share no beginning, so that no prefix cache knows them."""

import random
from collections.abc import Iterator

WORDS = """
    time year people way day man thing woman life child world school state family student group
    country problem hand part place case week company system program question work government
    number night point home water room mother area money story fact month lot right study book eye
    job word business issue side kind head house service friend father power hour game line end
    member law car city community name president team minute idea body information back parent face
    others level office door health person art war history party result change morning reason
    research girl guy moment air teacher force education
""".split()  # noqa: SIM905 - a list would take a line for each
"""Words that are one token each, with the space before them, in common vocabularies."""


def prompts(words: int, seed: int) -> Iterator[str]:
    """Prompts without end, of so many words each; the same ones for the same seed."""
    choose = random.Random(seed)
    while True:
        yield "Words: " + " ".join(choose.choices(WORDS, k=words))
