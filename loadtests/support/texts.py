"""Texts for requests: prompts of equal length, and sentences of many lengths."""

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

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
    """Endless prompts of that many words each; the same for the same seed."""
    choose = random.Random(seed)
    while True:
        yield "Words: " + " ".join(choose.choices(WORDS, k=words))


SHORTEST, LONGEST = 8, 256
MEAN = 64
SIGMA = 0.75
"""Of the logarithm: half of the requests have fewer than 48 tokens, one in twenty more than 166."""
SEED = 20261120
FIRST_ID, LAST_ID = 1000, 29000
"""Ordinary words of the vocabulary."""


def lengths(count: int) -> list[int]:
    """Log-normal lengths with a mean of MEAN, those outside of the range moved to its ends."""
    random_ = random.Random(SEED)
    mu = math.log(MEAN) - SIGMA**2 / 2
    drawn = (random_.lognormvariate(mu, SIGMA) for _ in range(count))
    return [min(max(round(each), SHORTEST), LONGEST) for each in drawn]


def sentences(count: int) -> list[list[int]]:
    """Token ids, the same at every call."""
    random_ = random.Random(SEED)
    return [[random_.randint(FIRST_ID, LAST_ID) for _ in range(each)] for each in lengths(count)]


def write_input_data(path: Path, found: Sequence[Sequence[int]], pad_to: int = 0) -> None:
    """A file for perf_analyzer's `--input-data`: one request for each sentence.

    With `pad_to` every sentence is padded to that many tokens, and masked.
    """
    data = [_request(each, pad_to or len(each)) for each in found]
    path.write_text(json.dumps({"data": data}))


def _request(ids: Sequence[int], length: int) -> dict[str, object]:
    padding = [0] * (length - len(ids))
    columns = {
        "input_ids": [*ids, *padding],
        "attention_mask": [1] * len(ids) + padding,
        "token_type_ids": [0] * length,
    }
    return {name: {"content": values, "shape": [length]} for name, values in columns.items()}
