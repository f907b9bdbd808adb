"""The conversations of every model: which there are, and when they are forgotten."""

import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from gateway.conversations.conversation import Conversation
from gateway.conversations.memory_budget import ByteLimits, Room
from gateway.conversations.rules import asked_turn, invalid, read_messages
from gateway.conversations.turn import Turn
from gateway.errors import Code, InferenceError
from gateway.generation import MESSAGES
from gateway.messages import InferRequest, SequenceTag
from gateway.models.model import Model
from gateway.schedulers.alarm import Alarm
from gateway.tensor import Tensor

NS_PER_SECOND = 1_000_000_000
BYTE_LIMITS = ByteLimits()


class Conversations:
    """Those of all models, each as long as its model is loaded. `clock_ns` is a monotonic one."""

    def __init__(
        self, clock_ns: Callable[[], int] = time.monotonic_ns, limits: ByteLimits = BYTE_LIMITS
    ) -> None:
        self._clock_ns = clock_ns
        self._room = Room(limits, self._forget_longest_idle)
        self._models: dict[Model, ModelConversations] = {}

    def turn(self, request: InferRequest, model: Model) -> Turn | None:
        """The turn that a request is which has a correlation id; None if it is none.

        Raises InferenceError for one that its conversation does not take. Nothing has happened
        until the model has accepted the turn.
        """
        found = asked_turn(request, model.config)
        return None if found is None else self._of(model).turn(request, found.tag, found.messages)

    def count(self, model: Model) -> int:
        """How many there are of a model."""
        found = self._models.get(model)
        return 0 if found is None else found.count

    @property
    def byte_size(self) -> int:
        """What all of them remember, in bytes of JSON."""
        return self._room.taken

    def _of(self, model: Model) -> "ModelConversations":
        found = self._models.get(model)
        if found is None:
            found = ModelConversations(model, self._clock_ns, self._room)
            self._models[model] = found
            model.when_closed(partial(self._forget, model))
        return found

    def _forget(self, model: Model) -> None:
        self._models.pop(model).close()

    def _forget_longest_idle(self, spare: object) -> bool:
        """Of all models, and not `spare`; False if there is none."""
        found = [(each.longest_idle(spare), each) for each in self._models.values()]
        idle = [(longest, each) for longest, each in found if longest is not None]
        if not idle:
            return False
        (_, key), owner = min(idle, key=lambda pair: pair[0][0])
        owner.forget(key)
        return True


class ModelConversations:
    """Those of one model, by correlation id; the number 7 and the text "7" are two."""

    def __init__(self, model: Model, clock_ns: Callable[[], int], room: Room) -> None:
        self._room = room
        self._name = model.name
        self._limits = model.conversation_limits
        self._clock_ns = clock_ns
        self._known: dict[int | str, Conversation] = {}
        self._idle: OrderedDict[int | str, Conversation] = OrderedDict()
        self._alarm = Alarm(self._forget_idle)

    @property
    def count(self) -> int:
        """How many are known."""
        return len(self._known)

    def turn(self, request: InferRequest, tag: SequenceTag, messages: Tensor) -> Turn:
        """The turn that a request is. Raises InferenceError, and then nothing has happened."""
        self._forget_idle()
        found = self._known.get(tag.correlation_id)
        if not tag.start and (found is None or not found.goes_on):
            raise invalid(self._unknown(tag.correlation_id))
        if found is None:
            self._refuse_if_full()
            found = self._new(tag.correlation_id)
        read = read_messages(request, messages, self._room.limits.each)
        return found.turn(request, read, start=tag.start)

    def longest_idle(self, spare: object) -> tuple[int, int | str] | None:
        """Since when, and which, of those that are not `spare`; None if there is none."""
        idle = self._idle.items()
        return next(((each.idle_since_ns, key) for key, each in idle if each is not spare), None)

    def forget(self, key: int | str) -> None:
        """Forget one that has no turn."""
        self._idle.pop(key, None)
        self._known.pop(key).forget()

    def close(self) -> None:
        """Forget all."""
        self._alarm.clear()
        for key in tuple(self._known):
            self.forget(key)

    def _new(self, key: int | str) -> Conversation:
        title = f"conversation {key!r} of model '{self._name}'"
        joined, rested = partial(self._joined, key), partial(self._rested, key)
        return Conversation(title, self._limits, self._room, joined, rested)

    def _joined(self, key: int | str, conversation: Conversation) -> None:
        self._idle.pop(key, None)
        if key not in self._known:
            if len(self._known) >= self._limits.count:
                self.forget(next(iter(self._idle)))
            self._known[key] = conversation

    def _rested(self, key: int | str, conversation: Conversation) -> None:
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
        return conversation.idle_since_ns + self._limits.idle_secs * NS_PER_SECOND

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
