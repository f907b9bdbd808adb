"""Turns of conversations: their requests, their answers, and the rules for both."""

import codecs
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import orjson

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.conversations.history import Age, History
from gateway.errors import Code, InferenceError
from gateway.generation import EXCLUDE_INPUT, MESSAGES, TEXT_OUTPUT
from gateway.messages import InferRequest, InferResponse, SequenceTag, responses_of_texts
from gateway.models.limits import ConversationLimits
from gateway.observability.gen_ai import CONVERSATION_ID
from gateway.observability.stream_tap import StreamTap
from gateway.schedulers.execution import Entry
from gateway.schedulers.scheduler import Scheduler
from gateway.tensor import Buffer, Datatype, Tensor, element_spans

REPLACEMENT = "\ufffd"
"""The character in place of bytes that are not UTF-8."""


class ConversationQueue(Protocol):
    """The queue of a conversation's turns; one turn runs at a time."""

    def enqueue(self, turn: "Turn") -> None:
        """Add an accepted turn; the queue calls `begin` when all earlier turns have ended."""

    def finish(self, turn: "Turn", error: InferenceError | None) -> None:
        """Remove a turn that has ended, or was cancelled before it began. Must not raise."""

    def check(self, history: History) -> None:
        """Raise INVALID_ARG if no further turn may follow this history."""


class Turn(StreamTap):
    """A request that waits for its conversation, and the answer of the model.

    Implements `Interceptor`: it collects the answer where responses are recorded, so the stream
    needs no other task. `age` is that of the conversation with it, None while it is not remembered.
    All methods are synchronous.
    """

    __slots__ = (
        "_accepted",
        "_answer",
        "_cut",
        "_queue",
        "_raw",
        "age",
        "begun",
        "ends",
        "history",
        "id",
        "messages",
    )

    def __init__(
        self, queue: ConversationQueue, history: History, request: InferRequest, messages: bytes
    ) -> None:
        super().__init__(None)
        self._queue = queue
        self.history = history
        self.messages = messages
        self.id = request.id
        self.ends = request.sequence is not None and request.sequence.end
        self.begun = False
        self.age: Age | None = None
        self._accepted: tuple[Entry, Scheduler] | None = None
        self._answer = bytearray()
        self._raw = b""
        self._cut = False

    def begin(self) -> None:
        """Submit the request to the model, with the whole history."""
        assert self._accepted is not None  # noqa: S101 - it was submitted, and has not ended
        entry, scheduler = self._accepted
        self.begun = True
        request = with_messages(entry.request, self.history.followed_by(self.messages))
        try:
            self._queue.check(self.history)
            scheduler.admit(request)
        except InferenceError as error:
            entry.stream.fail(error)
        else:
            scheduler.submit(Entry(request, entry.stream, entry.record))

    def remember(self) -> None:
        """Add its messages and its answer to the history."""
        self.history.take_back_answer(len(self._answer))
        if self._cut:
            self.history.cut = True
        else:
            answer = self._answer.decode("utf-8", "replace")
            tokens = self.record.prompt_tokens + self.record.completion_tokens
            self.history.append(self.messages, answer, tokens)
            self.age = None if self.history.cut else self.history.age
            if REPLACEMENT in answer:
                self._raw = bytes(self._answer)
        self._release()

    def forget(self) -> None:
        """Restore the history to the state before this turn."""
        self.history.take_back_answer(len(self._answer))
        self.history.take_back(self.messages)
        self._release()

    def remembered_size(self, size: int) -> int:
        """The bytes of the remembered answer for the first `size` bytes of the model's texts.

        They are as many, unless the texts are not UTF-8.
        """
        if not self._raw:
            return size
        is_whole = size >= len(self._raw)
        text, _ = codecs.utf_8_decode(self._raw[:size], "replace", is_whole)
        return len(text.encode())

    # Interceptor.

    def submit(self, entry: Entry, scheduler: Scheduler) -> None:
        """Wait for the earlier turns; the trace of the request has the id of its conversation."""
        trace, tag = entry.record.trace, entry.request.sequence
        if trace is not None and tag is not None:
            trace.asked = {**trace.asked, CONVERSATION_ID: str(tag.correlation_id)}
        self._accepted = (entry, scheduler)
        self._queue.enqueue(self)

    # StreamRecorder.

    def responded(self, response: InferResponse) -> None:
        """Record a response, and collect its text."""
        self.account.responded(response)
        self._collect(answer_text(response))

    def delivered(self, name: str, texts: Sequence[bytes], tokens: Sequence[int | None]) -> None:
        """As `responded` of each."""
        for each in responses_of_texts(name, texts, tokens):
            self.responded(each)

    def ended(self, error: InferenceError | None) -> None:
        """Record the end, and let the next turn begin."""
        self.account.ended(error)
        self._accepted = None
        self._queue.finish(self, error)

    def _collect(self, text: Buffer) -> None:
        size = memoryview(text).nbytes
        self._cut = self._cut or not self.history.reserve_answer(size)
        if not self._cut:
            self._answer += text

    def _release(self) -> None:
        """Free the texts; the stream, which refers to this turn, may live longer."""
        self._answer = bytearray()
        self.messages = b""


def converses(config: ModelConfig) -> bool:
    """Whether requests of one correlation id are turns of a conversation.

    With a sequence batcher they are Triton's sequences. With `conversation_max` 0 the model gets
    the id, as on Triton.
    """
    return (
        config.sequence_batching is None
        and _has_text(config.input, MESSAGES)
        and _has_text(config.output, TEXT_OUTPUT)
        and ConversationLimits.read(config).count > 0
    )


def is_turn(request: InferRequest) -> bool:
    """Whether a request has the parts of a turn: a correlation id, and messages."""
    tag = request.sequence
    return tag is not None and bool(tag.correlation_id) and request.input(MESSAGES) is not None


class TurnRequest(NamedTuple):
    """The parts of a request that make it a turn: its sequence parameters and its messages."""

    tag: SequenceTag
    messages: Tensor


def read_turn(request: InferRequest, config: ModelConfig) -> TurnRequest | None:
    """The turn in a request; None for a request outside of conversations."""
    tag = request.sequence
    if tag is None or not tag.correlation_id:
        return None
    messages = request.input(MESSAGES)
    if messages is None or messages.datatype is not Datatype.BYTES or not converses(config):
        return None
    return TurnRequest(tag, messages)


def _has_text(tensors: Sequence[ModelInput | ModelOutput], name: str) -> bool:
    return any(each.name == name and each.data_type is DataType.TYPE_STRING for each in tensors)


def read_messages(request: InferRequest, given: Tensor, limit: int) -> bytes:
    """The messages of a turn: the client's JSON list without its brackets.

    INVALID_ARG if it has more than `limit` bytes, if it is no list of at least one object, or if
    the request excludes the text that the history needs.
    """
    text = _only_element(given).strip()
    if len(text) > limit:
        raise invalid(
            f"input '{MESSAGES}' has {len(text)} bytes, and a conversation at most {limit}"
        )
    try:
        messages = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise invalid(f"input '{MESSAGES}' is not valid JSON: {error}") from None
    if not isinstance(messages, list):
        raise invalid(f"input '{MESSAGES}' is JSON, but a list is expected in it")
    if not messages or not all(isinstance(each, dict) for each in messages):
        raise invalid(
            f"input '{MESSAGES}' of a turn is expected to be a list of at least one message, each "
            "an object"
        )
    _check_answer_is_complete(request)
    return text[1:-1].strip()


def with_messages(request: InferRequest, messages: bytes) -> InferRequest:
    """The request for the model: it has the whole list of messages, and no sequence."""
    inputs = tuple(
        Tensor(each.name, each.datatype, each.shape, (messages,)) if each.name == MESSAGES else each
        for each in request.inputs
    )
    return replace(request, inputs=inputs, sequence=None)


def answer_text(response: InferResponse) -> Buffer:
    """The text that a response adds to the answer, in UTF-8; the first of several sequences."""
    output = response.output(TEXT_OUTPUT)
    if output is None:
        return b""
    if isinstance(output.data, tuple):
        return output.data[0] if output.data else b""
    data = output.raw()
    for start, end in element_spans(data):
        return memoryview(data)[start:end]
    return b""


def invalid(message: str) -> InferenceError:
    """The error for an invalid request."""
    return InferenceError(Code.INVALID_ARG, message)


def _only_element(tensor: Tensor) -> bytes:
    elements = tensor.elements()
    if len(elements) != 1:
        raise invalid(f"input '{tensor.name}' has {len(elements)} elements, expected 1")
    return bytes(elements[0])


def _check_answer_is_complete(request: InferRequest) -> None:
    exclude = request.input(EXCLUDE_INPUT)
    if exclude is not None and not any(exclude.raw()):
        raise invalid(
            f"input '{EXCLUDE_INPUT}' of a turn is false, expected true or nothing: its answer "
            "would repeat the conversation"
        )
    if request.outputs and all(each.name != TEXT_OUTPUT for each in request.outputs):
        raise invalid(
            f"the outputs asked for do not have '{TEXT_OUTPUT}', which a turn is remembered by"
        )
