"""One request in the engine: its sequences, and their new text after each step."""

from collections import deque
from collections.abc import Callable
from typing import Any

import triton_python_backend_utils as pb_utils
from sluice_llm.deltas import RankedToken, SequenceDelta, TokenLogprobs, finite
from sluice_llm.responses import TensorResponses, Writer
from sluice_llm.running import FINAL

from .model_file import BLOCK_TOKENS
from .sampling import Sampling
from .stops import StopFinder
from .tokens import Tokens

REASONS = {"STOP": "stop", "LENGTH": "length"}
IGNORED = "IGNORED"
"""The library's status of a sequence that has no room, or that is cancelled."""


class AnswerSequence:
    """One answer of a request; `add` adds it to the engine and returns the library's object."""

    def __init__(
        self, index: int, add: Callable[[], Any], sampling: Sampling, tokens: Tokens
    ) -> None:
        self.index = index
        self.reason: str | None = None
        self.tokens = 0
        self.cumulative = 0.0
        self._add = add
        self._handle: Any = None
        self._sampling = sampling
        # The library ends at no token while it ignores the end.
        self._ends = sampling.stop_tokens if sampling.ignore_end else frozenset()
        self._stop_tokens = tokens.ends | sampling.stop_tokens
        self._reader = tokens.reader(skip_special=sampling.skip_special)
        self._stops = StopFinder(sampling.stops, include=sampling.include_stop)

    def begin(self) -> None:
        """Add it to the engine; Mistake if the engine refuses it."""
        self._handle = self._add()

    def read(self) -> SequenceDelta | None:
        """New text and tokens; None if there is nothing new."""
        if self._handle is None:
            return None
        made: list[int] = []
        logprobs: list[float] = []
        reason: str | None = None
        while reason is None and self._handle.can_read():
            for output in self._handle.read().values():
                made += output.generated_ids
                logprobs += output.generated_log_probs
                reason = REASONS.get(output.finish_reason.name)
        if reason is None and self._handle.get_status().name == IGNORED:
            reason = "length"  # it has outgrown the cache
        if reason is None and not made:
            return None
        return self._delta(made, logprobs, reason)

    def _delta(self, made: list[int], logprobs: list[float], reason: str | None) -> SequenceDelta:
        if ended := next((at for at, each in enumerate(made, 1) if each in self._ends), 0):
            made, reason = made[:ended], "stop"
            self.cancel()
        self.tokens += len(made)
        shown = made
        if reason == "stop" and made and made[-1] in self._stop_tokens:
            shown = made if self._sampling.include_stop else made[:-1]
        text = self._reader.read(shown, final=reason is not None)
        enough = self.tokens >= self._sampling.min_tokens
        stopped = self._stops.read(text, active=enough, final=reason is not None)
        stop_reason = None
        if stopped.found:
            reason, stop_reason = "stop", stopped.found
            self.cancel()
        self.reason = reason
        self.cumulative += sum(logprobs[: len(made)])
        return SequenceDelta(
            index=self.index,
            text=stopped.text,
            tokens=len(made),
            finish_reason=reason,
            stop_reason=stop_reason,
            cumulative_logprob=self.cumulative,
            logprobs=self._chances(made, logprobs),
        )

    def _chances(self, made: list[int], logprobs: list[float]) -> tuple[TokenLogprobs, ...]:
        if self._sampling.logprobs is None:
            return ()
        rank = 0 if self._sampling.temperature else 1
        chosen = [
            RankedToken(token, finite(each), rank)
            for token, each in zip(made, logprobs, strict=False)
        ]
        return tuple([TokenLogprobs(each, (each,)) for each in chosen])

    def empty(self) -> SequenceDelta:
        """A delta without anything new."""
        return SequenceDelta(
            self.index, finish_reason=self.reason, cumulative_logprob=self.cumulative
        )

    def cancel(self) -> None:
        """Free its blocks at the next step."""
        if self._handle is not None:
            self._handle.cancel()


class RunningGeneration:
    """One request: its deltas become responses, one by one or together at the end.

    Its first sequence computes the prompt; the others are begun when that is in the cache.
    """

    def __init__(
        self, sender: Any, writer: Writer, sequences: list[AnswerSequence], prompt_tokens: int
    ) -> None:
        self.sender = sender
        self.prompt_tokens = prompt_tokens
        self.sequences = sequences
        self.stream = False
        self.room = 0
        self._writer = writer
        self._every = isinstance(writer, TensorResponses)
        self._open = {each.index: each for each in sequences}
        self._kept: dict[int, list[SequenceDelta]] = {each.index: [] for each in sequences}
        self._later = deque(sequences)

    @property
    def open_sequences(self) -> int:
        """The number of sequences that have not ended."""
        return len(self._open)

    def begin(self) -> None:
        """Add its first sequence to the engine; Mistake if the engine refuses it.

        All are added if the cache can have no whole block of the prompt.
        """
        self._begin(1 if self.prompt_tokens > BLOCK_TOKENS else len(self._later))

    def _begin(self, count: int) -> None:
        for _ in range(count):
            self._later.popleft().begin()

    @property
    def tokens(self) -> int:
        """The tokens made so far."""
        return sum(each.tokens for each in self.sequences)

    def deliver(self) -> bool:
        """Send what is new; whether the request is done."""
        deltas = [delta for each in self._open.values() if (delta := each.read()) is not None]
        for delta in deltas:
            if delta.finish_reason:
                del self._open[delta.index]
        if not deltas:
            return False
        self._begin(len(self._later))
        if self.stream:
            self._send(self._row(deltas))
        else:
            for delta in deltas:
                self._kept[delta.index].append(delta)
            if not self._open:
                self._send([_joined(each) for each in self._kept.values()])
        return not self._open

    def cancel(self) -> None:
        """End it in the engine."""
        self._later.clear()
        for each in self._open.values():
            each.cancel()

    def _row(self, deltas: list[SequenceDelta]) -> list[SequenceDelta]:
        """Of tensors each response has one element per sequence."""
        if not self._every or len(self.sequences) == 1:
            return deltas
        new = {each.index: each for each in deltas}
        return [new.get(each.index) or each.empty() for each in self.sequences]

    def _send(self, deltas: list[SequenceDelta]) -> None:
        final = not self._open
        responses = self._writer.responses(deltas, self.prompt_tokens, final=final)
        for number, response in enumerate(responses, 1):
            self.sender.send(response, FINAL if final and number == len(responses) else 0)
        if final and self.tokens >= self.room * len(self.sequences):
            pb_utils.Logger.log_info(
                f"text ended by the model's limit prompt_tokens={self.prompt_tokens} "
                f"tokens={self.tokens}"
            )


def _joined(deltas: list[SequenceDelta]) -> SequenceDelta:
    """All of one sequence."""
    last = deltas[-1]
    return SequenceDelta(
        index=last.index,
        text="".join([each.text for each in deltas]),
        tokens=sum([each.tokens for each in deltas]),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        cumulative_logprob=last.cumulative_logprob,
        logprobs=tuple([chance for each in deltas for chance in each.logprobs]),
    )
