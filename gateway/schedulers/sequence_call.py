"""The part of an execution that only sequences have."""

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple

from gateway.backend import Answer
from gateway.messages import InferRequest


class SequenceCall(NamedTuple):
    """The differences of an execution of sequences from others.

    `execute` is called instead of the instance's, with the same arguments. `padding_rows` are rows
    without a request. `runs_to_end`: it continues after every reader has disconnected, because it
    changes the states of sequences.
    """

    execute: Callable[[Sequence[InferRequest]], AsyncGenerator[Answer, None]] | None = None
    padding_rows: int = 0
    runs_to_end: bool = False


NO_SEQUENCES = SequenceCall()
