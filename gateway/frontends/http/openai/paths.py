"""Under which paths do OpenAI's endpoints stand, and which paths are theirs?"""

from collections.abc import Sequence

from gateway.openai_contract import Endpoint

V1 = ("/v1", "/openai/v1")
"""The second is where clients of KServe look."""

BARE = (Endpoint.TOKENIZE, Endpoint.DETOKENIZE)
"""vLLM has these without a version."""

BOTH = (Endpoint.SCORE, Endpoint.RERANK)
"""vLLM has these with and without a version."""


def paths_of(endpoint: Endpoint) -> Sequence[str]:
    """The paths of an endpoint, the usual one first."""
    bare = f"/{endpoint}"
    if endpoint in BARE:
        return (bare,)
    versioned = [f"{prefix}/{endpoint}" for prefix in V1]
    return [*versioned, bare] if endpoint in BOTH else versioned


def is_openai(path: str) -> bool:
    """Whether who asks for this path expects OpenAI's answers, also to what is wrong with it."""
    return path.startswith(tuple(f"{prefix}/" for prefix in V1)) or path in BARE_PATHS


BARE_PATHS = frozenset(f"/{each}" for each in (*BARE, *BOTH))
