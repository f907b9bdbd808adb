"""The conversations of all models: look-up, limits, expiry, and their move between versions."""

import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from gateway.conversations.conversation import Conversation
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
from gateway.models.model import Model
from gateway.schedulers.scheduler import Timer
from gateway.tensor import Tensor

BYTE_LIMITS = ByteLimits()


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

    def has(self, model: Model, tag: SequenceTag) -> bool:
        """Whether a model has the conversation of a tag."""
        found = self._models.get(model)
        return found is not None and found.has(tag)

    def find(self, model: Model, tag: SequenceTag) -> Conversation | None:
        """The conversation of a tag at a model; None without one, or if it is asleep."""
        found = self._models.get(model)
        return None if found is None else found.find(tag)

    def move(self, model: Model, successor: Model) -> None:
        """Let another version continue every conversation of a model, with its running turns."""
        found = self._models.get(model)
        if found is not None:
            self._of(successor).adopt(found)

    def copy(self, model: Model, tag: SequenceTag) -> ConversationCopy | None:
        """The copy of a conversation after a turn; None if its model has no copies.

        It has no messages if no turn may follow.
        """
        found = self._models.get(model)
        return None if found is None else found.copy(tag)

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
        self._is_closed = False

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

    def has(self, tag: SequenceTag) -> bool:
        """See `Conversations`; one that was copied here from another replica counts."""
        return tag.key in self._known or tag.key in self.copies

    def find(self, tag: SequenceTag) -> Conversation | None:
        """See `Conversations`."""
        return self._known.get(tag.key)

    def adopt(self, other: "ModelConversations") -> None:
        """Continue the conversations and copies of another version that are unknown here.

        The longest idle ones of both are dropped beyond the limit.
        """
        for key in other.keys - self.keys:
            conversation = other.release(key)
            conversation.owner = self
            self._known[key] = conversation
            if conversation.idle:
                self._idle[key] = conversation
        self.copies.adopt(other.copies)
        for key, conversation in tuple(self._known.items()):
            if conversation.is_older(self.copies.age(key)):
                self.forget(key)
            else:
                self.copies.drop(key)
        by_age = sorted(self._idle.items(), key=lambda pair: pair[1].idle_since_ns)
        self._idle = OrderedDict(by_age)
        while len(self._known) > self._limits.count and self._idle:
            self.forget(next(iter(self._idle)))
        self._forget_idle()

    @property
    def keys(self) -> set[SequenceKey]:
        """The keys of all conversations."""
        return set(self._known)

    def release(self, key: SequenceKey) -> Conversation:
        """Give a conversation away."""
        self._idle.pop(key, None)
        return self._known.pop(key)

    def copy(self, tag: SequenceTag) -> ConversationCopy | None:
        """See `Conversations`; a model that is closed has no copies."""
        if self._is_closed or not self._limits.copies:
            return None
        void = ConversationCopy(self._name, self._version, tag.tenant, tag.correlation_id)
        found = self._known.get(tag.key)
        return void if found is None else found.copy(void)

    def keep(self, copy: ConversationCopy) -> None:
        """See `Conversations`; a conversation here stays if it is newer, or has turns under way."""
        found = self._known.get(copy.key)
        if found is None:
            self.copies.keep(copy)
        elif copy.messages and found.is_older(copy.age):
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
        self._is_closed = True
        self._alarm.clear()
        self.copies.close()
        for key in tuple(self._known):
            self.forget(key)

    def _new(self, tag: SequenceTag, history: History) -> Conversation:
        title = f"conversation {tag.correlation_id!r} of model '{self._name}'"
        return Conversation(title, self._limits, history, tag, self)

    def _wake(self, tag: SequenceTag) -> None:
        """Have the conversation of a copy, if there is one, as an idle one."""
        if tag.key not in self.copies:
            return
        self._refuse_if_full()
        history = self.copies.take(tag.key)
        if history is None:
            return
        conversation = self._new(tag, history)
        self.activated(conversation)
        self.idled(conversation)

    # ConversationOwner.

    def activated(self, conversation: Conversation) -> None:
        """Know it; a new one may take the place of the longest idle one."""
        key = conversation.tag.key
        self._idle.pop(key, None)
        if key not in self._known:
            self.copies.drop(key)
            if len(self._known) >= self._limits.count:
                self.forget(next(iter(self._idle)))
            self._known[key] = conversation

    def idled(self, conversation: Conversation) -> None:
        """Forget it if it has ended, else keep it for the idle time."""
        key = conversation.tag.key
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

    def _idle_until_ns(self, conversation: Conversation) -> int:
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
