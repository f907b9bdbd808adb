"""The conversations of all models: look-up, limits, expiry; and the queue of turns of each."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial

import msgspec

from gateway.conversations.copies import ConversationCopy, SleepingCopies
from gateway.conversations.history import ByteLimits, History, MemoryBudget
from gateway.conversations.turn import (
    Turn,
    converses,
    invalid,
    read_messages,
    read_turn,
)
from gateway.errors import Code, InferenceError
from gateway.generation import MESSAGES
from gateway.messages import InferRequest, SequenceKey, SequenceTag
from gateway.models.limits import ConversationLimits
from gateway.models.model import Model
from gateway.schedulers.scheduler import Timer
from gateway.tensor import Tensor

BYTE_LIMITS = ByteLimits()

MAX_WAITING = 8
"""Turns that wait while one runs."""


class Conversations:
    """Those of all models, each while its model is loaded. `clock_ns` is monotonic."""

    def __init__(
        self, clock_ns: Callable[[], int] = time.monotonic_ns, limits: ByteLimits = BYTE_LIMITS
    ) -> None:
        self._clock_ns = clock_ns
        self._budget = MemoryBudget(limits, self._evict)
        self._models: dict[Model, ModelConversations] = {}

    def turn(self, request: InferRequest, model: Model) -> Turn | None:
        """The turn for a request; None for a request outside of conversations.

        Raises InferenceError if its conversation refuses it. It changes nothing until the model
        has accepted it.
        """
        found = read_turn(request, model.config)
        return None if found is None else self._of(model).turn(request, found.tag, found.messages)

    def count(self, model: Model) -> int:
        """The number of conversations of a model."""
        found = self._models.get(model)
        return 0 if found is None else found.count

    def copy(self, model: Model, tag: SequenceTag) -> ConversationCopy | None:
        """The copy of a conversation after a turn; None if its model has none.

        It has no messages if no turn may follow.
        """
        found = self._models.get(model)
        return None if found is None or not model.conversation_limits.copies else found.copy(tag)

    def keep(self, model: Model, copy: ConversationCopy) -> None:
        """Keep a copy of a conversation that another replica has, if the model has copies."""
        if converses(model.config) and model.conversation_limits.copies:
            self._of(model).keep(copy)

    @property
    def byte_size(self) -> int:
        """The size of all histories, in bytes of JSON; copies included."""
        return self._budget.used

    def _of(self, model: Model) -> "ModelConversations":
        found = self._models.get(model)
        if found is None:
            found = ModelConversations(model, self._clock_ns, self._budget)
            self._models[model] = found
            model.when_closed(partial(self._forget, model))
        return found

    def _forget(self, model: Model) -> None:
        self._models.pop(model).close()

    def _evict(self, spare: object) -> bool:
        """Forget the oldest copy, else the longest idle conversation but not `spare`.

        False if there is none.
        """
        copies = [each.copies for each in self._models.values()]
        asleep = [(at, each) for each in copies if (at := each.oldest_ns) is not None]
        if asleep:
            min(asleep, key=lambda pair: pair[0])[1].drop_oldest()
            return True
        found = [(each.longest_idle(spare), each) for each in self._models.values()]
        idle = [(longest, each) for longest, each in found if longest is not None]
        if not idle:
            return False
        (_, key), owner = min(idle, key=lambda pair: pair[0][0])
        owner.forget(key)
        return True


class ModelConversations:
    """Those of one model, by tenant and id; the number 7 and the text "7" are two ids."""

    def __init__(self, model: Model, clock_ns: Callable[[], int], budget: MemoryBudget) -> None:
        self._budget = budget
        self._name = model.name
        self._version = int(model.version)
        self._limits = model.conversation_limits
        self.copies = SleepingCopies(self._limits, clock_ns, budget)
        self._clock_ns = clock_ns
        self._known: dict[SequenceKey, Conversation] = {}
        self._idle: OrderedDict[SequenceKey, Conversation] = OrderedDict()
        self._alarm = Timer(self._forget_idle)

    @property
    def count(self) -> int:
        """The number of conversations."""
        return len(self._known)

    def turn(self, request: InferRequest, tag: SequenceTag, messages: Tensor) -> Turn:
        """The turn for a request; an InferenceError changes nothing."""
        self._forget_idle()
        if tag.key not in self._known and not tag.start:
            self._wake(tag)
        found = self._known.get(tag.key)
        if not tag.start and (found is None or not found.open):
            raise invalid(self._unknown(tag.correlation_id))
        if found is None:
            self._refuse_if_full()
            found = self._new(tag, History(self._budget))
        read = read_messages(request, messages, self._budget.limits.each)
        return found.turn(request, read, start=tag.start)

    def copy(self, tag: SequenceTag) -> ConversationCopy:
        """See `Conversations`."""
        void = ConversationCopy(self._name, self._version, tag.tenant, tag.correlation_id)
        found = self._known.get(tag.key)
        return void if found is None else found.copy(void)

    def keep(self, copy: ConversationCopy) -> None:
        """See `Conversations`; a conversation here stays if it is newer, or has turns under way."""
        found = self._known.get(copy.key)
        if found is None:
            self.copies.keep(copy)
        elif copy.messages and found.is_older(copy):
            self.forget(copy.key)
            self.copies.keep(copy)

    def longest_idle(self, spare: object) -> tuple[int, SequenceKey] | None:
        """Time and key of the longest idle one, but not `spare`; None if there is none."""
        idle = self._idle.items()
        return next(((each.idle_since_ns, key) for key, each in idle if each is not spare), None)

    def forget(self, key: SequenceKey) -> None:
        """Forget a conversation without turns."""
        self._idle.pop(key, None)
        self._known.pop(key).forget()

    def close(self) -> None:
        """Forget all."""
        self._alarm.clear()
        self.copies.close()
        for key in tuple(self._known):
            self.forget(key)

    def _new(self, tag: SequenceTag, history: History) -> "Conversation":
        title = f"conversation {tag.correlation_id!r} of model '{self._name}'"
        activated, idled = partial(self._activated, tag.key), partial(self._idled, tag.key)
        return Conversation(title, self._limits, history, activated, idled)

    def _wake(self, tag: SequenceTag) -> None:
        """Have the conversation of a copy, if there is one, as an idle one."""
        if tag.key not in self.copies:
            return
        self._refuse_if_full()
        history = self.copies.take(tag.key)
        if history is None:
            return
        conversation = self._new(tag, history)
        self._activated(tag.key, conversation)
        self._idled(tag.key, conversation)

    def _activated(self, key: SequenceKey, conversation: "Conversation") -> None:
        self._idle.pop(key, None)
        if key not in self._known:
            self.copies.drop(key)
            if len(self._known) >= self._limits.count:
                self.forget(next(iter(self._idle)))
            self._known[key] = conversation

    def _idled(self, key: SequenceKey, conversation: "Conversation") -> None:
        if conversation.ended:
            self.forget(key)
            return
        conversation.idle_since_ns = self._clock_ns()
        self._idle[key] = conversation
        self._alarm.set(self._idle_until_ns(conversation))

    def _forget_idle(self) -> None:
        now_ns = self._clock_ns()
        while self._idle:
            key, conversation = next(iter(self._idle.items()))
            idle_until_ns = self._idle_until_ns(conversation)
            if idle_until_ns > now_ns:
                self._alarm.set(idle_until_ns)
                return
            self.forget(key)

    def _idle_until_ns(self, conversation: "Conversation") -> int:
        return conversation.idle_since_ns + self._limits.idle_ns

    def _refuse_if_full(self) -> None:
        if len(self._known) >= self._limits.count and not self._idle:
            raise InferenceError(
                Code.UNAVAILABLE,
                f"model '{self._name}' has {self._limits.count} conversations with turns under "
                "way, the most it keeps (its parameter 'conversation_max'); retry later",
            )

    def _unknown(self, key: int | str) -> str:
        return (
            f"conversation {key!r} of model '{self._name}' is not open: it has not begun, has "
            f"ended, was idle for {self._limits.idle_secs} s, has made room for another one, or "
            "its model was loaded anew; begin it with 'sequence_start', and with all that was "
            f"said in '{MESSAGES}'"
        )


class Conversation:
    """The turns of one correlation id, one after the other; implements `ConversationQueue`.

    `activated` is called when a turn is enqueued, `idled` when none is left. All methods are
    synchronous. The next turn begins in a later step of the loop, so that a broken stream has
    cancelled all its turns before.
    """

    def __init__(
        self,
        title: str,
        limits: ConversationLimits,
        history: History,
        activated: Callable[["Conversation"], None],
        idled: Callable[["Conversation"], None],
    ) -> None:
        self.ended = False
        self.idle_since_ns = 0
        self._title = title
        self._limits = limits
        self._budget = history.budget
        self._activated = activated
        self._idled = idled
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
        """Its copy, made of one without messages; that one if no turn may follow."""
        history = self._history
        if not history.age.turns or history.cut:
            return void
        return msgspec.structs.replace(
            void,
            began_ns=history.age.began_ns,
            turns=history.age.turns,
            tokens=history.tokens,
            messages=history.messages,
        )

    def is_older(self, copy: ConversationCopy) -> bool:
        """Whether a copy may replace it."""
        return not self._turns and self._history.age < copy.age

    def forget(self) -> None:
        """Drop the history of a conversation without turns."""
        self._history.drop()

    # ConversationQueue.

    def enqueue(self, turn: Turn) -> None:
        """Add an accepted turn; it begins at once if it is the only one."""
        turn.history.reserve(turn.messages)
        self._turns.append(turn)
        self._activated(self)
        if len(self._turns) == 1:
            self._begin(turn)

    def finish(self, turn: Turn, error: InferenceError | None) -> None:
        """Remove a turn; remember it if it succeeded, or was cancelled while it ran.

        A turn that failed, or was cancelled before it began, is not remembered.
        """
        self._turns.remove(turn)
        if turn.begun and (error is None or error.code is Code.CANCELLED):
            turn.remember()
        else:
            turn.forget()
        if turn.begun:
            self.ended = turn.ends
        if self._turns:
            asyncio.get_running_loop().call_soon(self._begin_next)
        else:
            self._idled(self)

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
                f"{self._title} cannot go on: its latest answer was too long to be remembered "
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
