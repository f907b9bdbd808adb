"""One conversation: whose turn is it, and what is known by then?"""

import asyncio
from collections import deque
from collections.abc import Callable

from gateway.conversations.history import History
from gateway.conversations.memory_budget import Room
from gateway.conversations.rules import invalid
from gateway.conversations.turn import Turn
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.models.limits import ConversationLimits

MAX_WAITING = 8
"""Turns that wait for the one that is under way."""


class Conversation:
    """The turns of one correlation id, one after the other; implements `Line`.

    `joined` is told when it has a turn again, `rested` when it has none any more. Everything is
    plain; the next turn begins in another step of the loop than the one before it has ended in,
    so that of a stream that breaks all turns have gone by then.
    """

    def __init__(
        self,
        title: str,
        limits: ConversationLimits,
        room: Room,
        joined: Callable[["Conversation"], None],
        rested: Callable[["Conversation"], None],
    ) -> None:
        self.ended = False
        self.idle_since_ns = 0
        self._title = title
        self._limits = limits
        self._room = room
        self._joined = joined
        self._rested = rested
        self._turns: deque[Turn] = deque()
        self._history = History(room)

    @property
    def goes_on(self) -> bool:
        """Whether a turn may come that does not start anew."""
        return not (self._turns[-1].ends if self._turns else self.ended)

    def turn(self, request: InferRequest, messages: bytes, *, start: bool) -> Turn:
        """The turn that a request is; nothing has happened until it is accepted.

        Raises InferenceError: INVALID_ARG for one too many, ALREADY_EXISTS for an id that runs,
        UNAVAILABLE if too many wait, or all conversations take too much.
        """
        self._refuse_full(request)
        history = History(self._room) if start else self._latest
        if history.turns >= self._limits.turns:
            raise invalid(
                f"{self._title} has had {history.turns} turns, the most it may have (parameter "
                "'conversation_max_turns'); begin anew with 'sequence_start'"
            )
        self.check(history)
        self._refuse_large(history, len(messages), start=start)
        return Turn(self, history, request, messages)

    def forget(self) -> None:
        """Nobody goes on with it; it has no turns."""
        self._history.drop()

    # Line.

    def join(self, turn: Turn) -> None:
        """The turn has been accepted: it begins now or when it comes."""
        turn.history.reserve(turn.messages)
        self._turns.append(turn)
        self._joined(self)
        if len(self._turns) == 1:
            self._begin(turn)

    def over(self, turn: Turn, error: InferenceError | None) -> None:
        """A turn has ended: well, cancelled with what it has said until then, or as if not asked.

        Nothing is left of one that was left before it began, or has failed.
        """
        self._turns.remove(turn)
        if turn.begun and (error is None or error.code is Code.CANCELLED):
            turn.remember()
        else:
            turn.forget()
        if turn.begun:
            self.ended = turn.ends
        if self._turns:
            asyncio.get_running_loop().call_soon(self._go_on)
        else:
            self._rested(self)

    def check(self, history: History) -> None:
        """Raise INVALID_ARG if the history is too long for one more turn."""
        limit = self._limits.tokens
        if limit and history.tokens >= limit:
            raise invalid(
                f"{self._title} has {history.tokens} tokens, and the limit is {limit} (parameter "
                "'conversation_max_tokens'); begin anew with 'sequence_start'"
            )
        if history.cut:
            raise invalid(
                f"{self._title} cannot go on: its latest answer was too long to be remembered "
                f"(a conversation may have {self._room.limits.each} bytes, all of them together "
                f"{self._room.limits.total}); begin anew with 'sequence_start'"
            )

    @property
    def _latest(self) -> History:
        """What a turn follows that is asked for now."""
        return self._turns[-1].history if self._turns else self._history

    def _go_on(self) -> None:
        if self._turns and not self._turns[0].begun:
            self._begin(self._turns[0])

    def _begin(self, turn: Turn) -> None:
        if self._history is not turn.history:
            self._history.drop()
            self._history = turn.history
        turn.begin()

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
        limits, after = self._room.limits, history.byte_size + size
        if after > limits.each:
            raise invalid(
                f"{self._title} would have {after} bytes of messages, the most it may have is "
                f"{limits.each}; begin anew with 'sequence_start'"
            )
        # What is begun anew may itself be what has to go.
        if not self._room.make(size, spare=None if start else self):
            raise InferenceError(
                Code.UNAVAILABLE,
                f"all conversations together have {self._room.taken} bytes of messages, the most "
                f"they may have is {limits.total}, and those that are idle have gone; retry later",
            )
