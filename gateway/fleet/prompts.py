"""The prompts of one model in a router: their tokens, their keys, and their prefixes."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import orjson

from gateway.fleet.choice import Demand
from gateway.fleet.keys import MOST_KEYED_BYTES, PIECE_BYTES, SECRET_BYTES, PrefixScope, PromptKeys
from gateway.fleet.offers import Key
from gateway.fleet.prefixes import KeyIndex
from gateway.generation import IMAGE, MESSAGES, SAMPLING_PARAMETERS, TEXT_INPUT
from gateway.messages import InferRequest, RoutedPrompt, Usage
from gateway.openai_contract import REQUEST
from gateway.policy.caller import tenant_of
from gateway.schedulers.token_ratio import TokenRatio, size_bytes, text_bytes
from gateway.tensor import Tensor

MOST_READ_BYTES = 1 << 20
"""A longer JSON text is not parsed for keys, since that would block other requests."""
ADAPTER, SALT = "lora_name", "cache_salt"
"""Sampling parameters that are part of the keys of an engine's cache."""
VALUE_BYTES = 16
"""Bytes counted for each value of a long JSON text, so that the values that are read are few."""
UNREADABLE = (RecursionError, TypeError, ValueError)
"""The errors of texts that are no JSON, and of values that JSON does not have."""


class PrefixIndexes(defaultdict[Key, KeyIndex]):
    """The prefixes of each model at all replicas; a router has one, and its connections fill it.

    `replicas` are the ids of the connected replicas: each has one connection, which fills them.
    """

    def __init__(self, made: Callable[[], KeyIndex]) -> None:
        super().__init__(made)
        self.replicas: set[str] = set()


def keys_of_fleet(name: str, secret: bytes) -> PromptKeys:
    """The keys of prompts of a fleet; without a secret they follow from its name."""
    return PromptKeys(secret or blake2b(name.encode(), digest_size=SECRET_BYTES).digest())


class ModelPrompts:
    """The prompts of one version of a model.

    It `has_tokens` once a response has had usage, or a replica holds prefixes; before, nothing of a
    request is read. `adapters` are names that a request may give instead of the model's.
    """

    def __init__(
        self, key: Key, keys: PromptKeys, index: KeyIndex, adapters: Sequence[str] = ()
    ) -> None:
        self.index = index
        self._key = key
        self._keys = keys
        self._adapters = frozenset(adapters)
        self._ratio = TokenRatio()
        self._has_usage = False

    @property
    def has_tokens(self) -> bool:
        """Whether its requests are counted in tokens."""
        return self._has_usage or len(self.index) > 0

    def learn(self, prompt: RoutedPrompt | None, usage: Usage) -> None:
        """Learn from the usage of a response."""
        if usage.prompt_tokens:
            self._has_usage = True
            if prompt is not None:
                self._ratio.learn(prompt.size_bytes, usage.prompt_tokens)

    def demand(self, prompt: RoutedPrompt, now: float) -> Demand:
        """The tokens of a prompt, and those of its prefix at each replica."""
        tokens = self._ratio.tokens(prompt.size_bytes)
        if not prompt.keys:
            return Demand(tokens=tokens)
        key_tokens = PIECE_BYTES * self._ratio.value
        depths = self.index.held(prompt.keys, now)
        return Demand(tokens=tokens, held={k: round(n * key_tokens) for k, n in depths.items()})

    def read(self, request: InferRequest) -> RoutedPrompt:
        """The prompt of a request; one that cannot be read has a size only."""
        size = text_bytes(request)
        # The rest of a conversation is at its replica, and an image is not in the text.
        if size < PIECE_BYTES or request.sequence is not None or request.input(IMAGE) is not None:
            return RoutedPrompt(size)
        try:
            return self._read(request, size) or RoutedPrompt(size)
        except UNREADABLE:
            return RoutedPrompt(size)

    def _read(self, request: InferRequest, size: int) -> RoutedPrompt | None:
        """The prompt of a request of that size, if it has one of the inputs of LLMs."""
        whole, tenant = request.input(REQUEST), tenant_of(request.caller)
        if whole is not None:
            members = _members(whole)
            return None if members is None else self._of_members(members, tenant, size)
        text, messages = request.input(TEXT_INPUT), request.input(MESSAGES)
        given = request.input(SAMPLING_PARAMETERS)
        parsed = (given, messages if text is None else None)
        if any(each is not None and size_bytes(each) > MOST_READ_BYTES for each in parsed):
            return None
        sampling = request.parameters if given is None else orjson.loads(_only(given))
        if not isinstance(sampling, Mapping):
            return None
        scope = self._scope(sampling, sampling.get(ADAPTER), tenant)
        if text is not None:
            found = _only(text)
            return RoutedPrompt(len(found), self._keys.of_text(scope, _beginning(found)))
        return None if messages is None else self._of(scope, orjson.loads(_only(messages)), size)

    def _of_members(
        self, members: Mapping[str, Any], tenant: str, size: int
    ) -> RoutedPrompt | None:
        """The prompt of an OpenAI request: messages, a text, or token ids."""
        name = members.get("model")
        scope = self._scope(members, name if name in self._adapters else None, tenant)
        found = members.get("messages", members.get("prompt", members.get("input")))
        before = (members.get("tools"), members.get("instructions"))
        return self._of(scope, found, size, before)

    def _of(
        self, scope: PrefixScope, found: Any, size: int, before: Sequence[Any] = ()
    ) -> RoutedPrompt | None:
        """The prompt of a request of that size; its text, or what is `before` its messages."""
        if isinstance(found, str):
            return RoutedPrompt(_text_bytes(found), self._keys.of_text(scope, found))
        if not isinstance(found, list) or not found:
            return None
        if type(found[0]) is int:
            keys = self._keys.of_tokens(scope, found)
            return RoutedPrompt(round(len(found) / self._ratio.value), keys)
        if is_long := size > MOST_KEYED_BYTES:
            (before, *found), _ = _cut([before, *found], MOST_KEYED_BYTES)
        tools = orjson.dumps(before) if any(before) else b""
        messages = [orjson.dumps(each) for each in found]
        keys = self._keys.of_messages(scope, tools, messages)
        return RoutedPrompt(size if is_long else len(tools) + sum(map(len, messages)), keys)

    def _scope(self, given: Mapping[str, Any], adapter: object, tenant: str) -> PrefixScope:
        name, version = self._key
        salt = given.get(SALT)
        return PrefixScope(
            model=name,
            version=str(version),
            adapter=adapter if isinstance(adapter, str) else "",
            cache_salt=salt if isinstance(salt, str) else "",
            tenant=tenant,
        )


def _text_bytes(text: str) -> int:
    """The bytes of a text; those of a long one follow from its beginning."""
    if text.isascii():
        return len(text)
    beginning = text[:MOST_KEYED_BYTES]
    return round(len(text) * len(beginning.encode(errors="surrogatepass")) / len(beginning))


def _beginning(text: bytes) -> str:
    """The part of a text that has keys."""
    if len(text) <= MOST_KEYED_BYTES:
        return text.decode()
    return text[: MOST_KEYED_BYTES + 3].decode(errors="ignore")  # without a part of a character


def _cut(value: Any, room: int) -> tuple[Any, int]:
    """The beginning of a JSON value, and the part of the room that is left."""
    room -= VALUE_BYTES
    if isinstance(value, str):
        return value[: max(0, room)], room - len(value)
    if not isinstance(value, dict | list | tuple):
        return value, room
    kept: list[Any] = []
    for each in value.items() if isinstance(value, dict) else value:
        if room <= 0:
            break
        beginning, room = _cut(each, room)
        kept.append(beginning)
    if isinstance(value, dict):
        return dict(each for each in kept if len(each) == 2), room  # the last key has no value
    return kept, room


def _only(tensor: Tensor) -> bytes:
    """The only text of a tensor; ValueError if there are more."""
    (element,) = tensor.elements()
    return element


def _members(body: Tensor) -> Mapping[str, Any] | None:
    """The members of a request, which are left to a model of this process."""
    known = getattr(body.data, "members", None)  # of a `RequestBody`
    if known is None and size_bytes(body) <= MOST_READ_BYTES:
        known = orjson.loads(_only(body))
    return known if isinstance(known, dict) else None
