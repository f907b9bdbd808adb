"""One conversation: the queue of its turns, and its limits."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from gateway.conversations.copies import ConversationCopy
from gateway.conversations.history import Age, History
from gateway.conversations.turn import Turn, invalid
from gateway.errors import Code, InferenceError, LostError
from gateway.messages import InferRequest, SequenceTag
from gateway.models.limits import ConversationLimits

MAX_WAITING = 8
"""Turns that wait while one runs."""

Shorten = Callable[[int], bool]
"""Cuts an answer to that many bytes; False if nothing has changed."""


class ConversationOwner(Protocol):
    """The conversations of a model, of which one is a part."""

    def activated(self, conversation: "Conversation") -> None:
        """Called when a turn is enqueued."""

    def idled(self, conversation: "Conversation") -> None:
        """Called when no turn is left."""

    def copy(self, tag: SequenceTag) -> ConversationCopy | None:
        """The present copy of the conversation of a tag; None if none are made."""


class Conversation:
    """The turns of one correlation id, one after the other; implements `ConversationQueue`.

    Its `owner` changes when it moves to another version; `tag` has its id. All methods are
    synchronous. The next turn begins in a later step of the loop, so that a broken stream has
    cancelled all its turns before.
    """

    def __init__(
        self,
        title: str,
        limits: ConversationLimits,
        history: History,
        tag: SequenceTag,
        owner: ConversationOwner,
    ) -> None:
        self.tag = tag
        self.owner = owner
        self.ended = False
        self.idle_since_ns = 0
        self._title = title
        self._limits = limits
        self._budget = history.budget
        self._turns: deque[Turn] = deque()
        self._history = history

    @property
    def open(self) -> bool:
        """Whether it takes a turn without `sequence_start`."""
        return not (self._turns[-1].ends if self._turns else self.ended)

    def turn(self, request: InferRequest, messages: bytes, *, start: bool) -> Turn:
        """The turn for a request; it changes nothing until it is enqueued.

        Raises InferenceError: INVALID_ARG beyond a limit of the conversation, ALREADY_EXISTS for
        the id of a turn that has not ended, UNAVAILABLE if too many turns wait, or if all
        conversations together are too large.
        """
        self._refuse_full(request)
        history = History(self._budget) if start else self._latest
        if history.turns >= self._limits.turns:
            raise invalid(
                f"{self._title} has had {history.turns} turns, the most it may have (parameter "
                "'conversation_max_turns'); begin anew with 'sequence_start'"
            )
        self.check(history)
        self._refuse_large(history, len(messages), start=start)
        return Turn(self, history, request, messages)

    def copy(self, void: ConversationCopy) -> ConversationCopy:
        """Its copy, made of one without age and messages; it gets none if no turn may follow."""
        history = self._history
        began_ns, turns = history.age
        aged = msgspec.structs.replace(void, began_ns=began_ns, turns=turns)
        if not turns or history.cut:
            return aged
        return msgspec.structs.replace(aged, tokens=history.tokens, messages=history.messages)

    def copied(self) -> ConversationCopy | None:
        """The present copy of its id, at the version that has it now; None if none are made."""
        return self.owner.copy(self.tag)

    def shortener(self) -> Shorten | None:
        """Cuts the remembered answer of the last turn; None without a turn.

        It does nothing once a later turn has begun, to whose prompt the answer belongs.
        """
        return partial(self._shorten, self._turns[-1]) if self._turns else None

    def is_older(self, age: Age) -> bool:
        """Whether a copy of that age may replace it."""
        return not self._turns and self._history.age < age

    @property
    def idle(self) -> bool:
        """Whether it has no turns."""
        return not self._turns

    def forget(self) -> None:
        """Drop the history of a conversation without turns."""
        self._history.drop()

    # ConversationQueue.

    def enqueue(self, turn: Turn) -> None:
        """Add an accepted turn; it begins at once if it is the only one."""
        turn.history.reserve(turn.messages)
        self._turns.append(turn)
        self.owner.activated(self)
        if len(self._turns) == 1:
            self._begin(turn)

    def finish(self, turn: Turn, error: InferenceError | None) -> None:
        """Remove a turn; remember it if it succeeded, or was cancelled while it ran.

        A turn that failed, was cancelled before it began, or was lost, is not remembered.
        """
        self._turns.remove(turn)
        is_lost = isinstance(error, LostError)
        if turn.begun and not is_lost and (error is None or error.code is Code.CANCELLED):
            turn.remember()
        else:
            turn.forget()
        if turn.begun:
            self.ended = turn.ends
        if self._turns:
            asyncio.get_running_loop().call_soon(self._begin_next)
        else:
            self.owner.idled(self)

    def check(self, history: History) -> None:
        """Raise INVALID_ARG if the history is too long for a further turn."""
        limit = self._limits.tokens
        if limit and history.tokens >= limit:
            raise invalid(
                f"{self._title} has {history.tokens} tokens, and the limit is {limit} (parameter "
                "'conversation_max_tokens'); begin anew with 'sequence_start'"
            )
        if history.cut:
            raise invalid(
                f"{self._title} cannot continue: its latest answer was too long to be remembered "
                f"(a conversation may have {self._budget.limits.each} bytes, all of them together "
                f"{self._budget.limits.total}); begin anew with 'sequence_start'"
            )

    @property
    def _latest(self) -> History:
        """The history that a new turn continues."""
        return self._turns[-1].history if self._turns else self._history

    def _begin_next(self) -> None:
        if self._turns and not self._turns[0].begun:
            self._begin(self._turns[0])

    def _begin(self, turn: Turn) -> None:
        if self._history is not turn.history:
            self._history.drop()
            self._history = turn.history
        turn.begin()

    def _shorten(self, turn: Turn, size: int) -> bool:
        history, is_last = self._history, not any(each.begun for each in self._turns)
        is_latest = is_last and turn.history is history and turn.age == history.age
        return is_latest and history.shorten_answer(turn.remembered_size(size))

    def _refuse_full(self, request: InferRequest) -> None:
        if request.id and any(each.id == request.id for each in self._turns):
            raise InferenceError(
                Code.ALREADY_EXISTS,
                f"{self._title} has a turn with the id '{request.id}' that has not ended; each "
                "needs an id of its own",
            )
        if len(self._turns) > MAX_WAITING:
            raise InferenceError(
                Code.UNAVAILABLE,
                f"{self._title} has {MAX_WAITING} turns that wait, the most it may have; retry "
                "later",
            )

    def _refuse_large(self, history: History, size: int, *, start: bool) -> None:
        limits, after = self._budget.limits, history.byte_size + size
        if after > limits.each:
            raise invalid(
                f"{self._title} would have {after} bytes of messages, the most it may have is "
                f"{limits.each}; begin anew with 'sequence_start'"
            )
        # A turn with `sequence_start` needs no history: its own conversation may be evicted.
        if not self._budget.make_room(size, spare=None if start else self):
            raise InferenceError(
                Code.UNAVAILABLE,
                f"all conversations together have {self._budget.used} bytes of messages, the most "
                f"they may have is {limits.total}, and none is idle; retry later",
            )
