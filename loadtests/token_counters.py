"""What a server says it has read and made: its own counters of tokens."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.request import urlopen

SETTLE_SECS = 5.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of prompts and of completions."""

    prompt: int
    completion: int

    def __sub__(self, earlier: "Tokens") -> "Tokens":
        return Tokens(self.prompt - earlier.prompt, self.completion - earlier.completion)


@dataclass(frozen=True, slots=True)
class TokenCounters:
    """Where a server's metrics are, and what the two counters are called."""

    port: int
    prompt: str
    completion: str

    def read(self) -> Tokens:
        """The counters now."""
        lines = read_metrics(self.port)
        return Tokens(int(total(lines, self.prompt)), int(total(lines, self.completion)))

    def read_after(self, before: Tokens, expected: int) -> Tokens:
        """What was counted since `before`, as soon as `expected` completion tokens are.

        A server counts a request when it has ended, which may be after its client knows.
        """
        deadline = time.monotonic() + SETTLE_SECS
        while (found := self.read() - before).completion < expected:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return found


def read_metrics(port: int) -> Sequence[str]:
    """The lines of a server's metrics page."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return str(response.read(), "utf-8").splitlines()


def total(lines: Sequence[str], name: str) -> float:
    """The sum of all series of one metric."""
    series = (line for line in lines if line.startswith((f"{name}{{", f"{name} ")))
    return sum(float(line.rsplit(" ", 1)[1]) for line in series)
