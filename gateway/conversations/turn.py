"""One turn of a conversation: the request that waits for it, and what the model answers."""

from typing import Protocol

from gateway.conversations.history import History
from gateway.conversations.rules import said, with_messages
from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.observability.request_record import Record
from gateway.schedulers.scheduler import Entry, Scheduler
from gateway.tensor import Buffer


class Line(Protocol):
    """Where turns wait for those before them."""

    def join(self, turn: "Turn") -> None:
        """A turn has been accepted; it is told to `begin` when it comes."""

    def over(self, turn: "Turn", error: InferenceError | None) -> None:
        """A turn has ended, or was left before it began. Must not raise."""

    def check(self, history: History) -> None:
        """Raise INVALID_ARG if one more turn cannot follow it."""


class Turn:
    """Implements `Gate`, and `StreamRecorder` for the record behind it.

    It hears what the model answers where that is recorded, so that nothing stands between the model
    and its reader. Plain, as its callers are: the line moves on when the stream ends.
    """

    __slots__ = (
        "_accepted",
        "_account",
        "_answer",
        "_cut",
        "_line",
        "_tokens",
        "begun",
        "ends",
        "history",
        "id",
        "messages",
    )

    def __init__(
        self, line: Line, history: History, request: InferRequest, messages: bytes
    ) -> None:
        self._line = line
        self.history = history
        self.messages = messages
        self.id = request.id
        self.ends = request.sequence is not None and request.sequence.end
        self.begun = False
        self._accepted: tuple[Entry, Scheduler] | None = None
        self._account: Record | None = None
        self._answer = bytearray()
        self._cut = False
        self._tokens = 0

    def begin(self) -> None:
        """Ask the model, with all that was said before."""
        assert self._accepted is not None  # noqa: S101 - it has joined, and is not over
        entry, scheduler = self._accepted
        self.begun = True
        request = with_messages(entry.request, self.history.followed_by(self.messages))
        try:
            self._line.check(self.history)
            scheduler.admit(request)
        except InferenceError as error:
            entry.stream.fail(error)
        else:
            scheduler.submit(Entry(request, entry.stream, entry.record))

    def remember(self) -> None:
        """Put what was asked and answered into the history."""
        self.history.unhear(len(self._answer))
        if self._cut:
            self.history.cut = True
        else:
            answer = self._answer.decode("utf-8", "replace")
            self.history.keep(self.messages, answer, self._tokens)
        self._let_go()

    def forget(self) -> None:
        """Leave the history as if nothing had been asked."""
        self.history.unhear(len(self._answer))
        self.history.take_back(self.messages)
        self._let_go()

    # Gate.

    def recorder(self, record: Record) -> "Turn":
        """This turn, in front of the record."""
        self._account = record
        return self

    def submit(self, entry: Entry, scheduler: Scheduler) -> None:
        """Wait for the turns before it."""
        self._accepted = (entry, scheduler)
        self._line.join(self)

    # StreamRecorder.

    def responded(self, response: InferResponse) -> None:
        """Remember what it says."""
        self._recorded.responded(response)
        self._hear(said(response))
        if response.usage is not None:
            self._tokens += response.usage.prompt_tokens + response.usage.completion_tokens

    def taken(self) -> None:
        """Nothing of a conversation's concern."""
        self._recorded.taken()

    def wasted(self, response: InferResponse) -> None:
        """Nothing of a conversation's concern: nobody has read it."""
        self._recorded.wasted(response)

    def ended(self, error: InferenceError | None) -> None:
        """Let the next turn come."""
        self._recorded.ended(error)
        self._accepted = None
        self._line.over(self, error)

    def _hear(self, text: Buffer) -> None:
        size = memoryview(text).nbytes
        self._cut = self._cut or not self.history.hear(size)
        if not self._cut:
            self._answer += text

    def _let_go(self) -> None:
        """Its stream may be held on to for longer than its conversation."""
        self._answer = bytearray()
        self.messages = b""

    @property
    def _recorded(self) -> Record:
        assert self._account is not None  # noqa: S101 - a stream has been made with it
        return self._account
