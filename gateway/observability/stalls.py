"""The parts of the time of a request, without its waits for the client."""

from typing import Final

Part = tuple[str, int]
"""The name and the duration of a part, in nanoseconds."""
NO_STALLS: Final = (0, 0)
"""The waits of a request that never waited: during its execution, and after it."""

EXECUTION = ("generate", "engine", "infer", "detokenize", "output", "steps", "replay", "batch")
"""The parts in which an answer that is sent may wait for its client, the likeliest first."""


def less_stalls(parts: list[Part], during_ns: int, after_ns: int) -> list[Part]:
    """The parts without the waits for the client, which are a part of their own."""
    if not (during_ns or after_ns):
        return parts
    left = dict(parts)
    stall_ns = 0
    for wait_ns, names in ((during_ns, EXECUTION), (after_ns, ("encode",))):
        for name in names:
            taken_ns = min(wait_ns, left.get(name, 0))
            if taken_ns:
                left[name] -= taken_ns
                wait_ns -= taken_ns
                stall_ns += taken_ns
    return [*left.items(), ("stall", stall_ns)]
