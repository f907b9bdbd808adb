"""Messages between the server and the clients of a shared engine, but for their requests.

The encoding is MessagePack; both ends have the same version.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import orjson

from backends.vllm.settings import EngineModel
from gateway.processes.inference_calls import InferenceKind

OMITTED = frozenset({"args", "exc_info", "exc_text", "stack_info", "msg"})
"""Attributes of a log record that are not sent, or sent in another form."""

_formatter = logging.Formatter()


class ClientSettings(msgspec.Struct, array_like=True):
    """Settings of a client: the model, its index, and the engine's addresses.

    `addresses` has vLLM's names as keys; `input_fd` and `output_fd` already listen at two of them.
    `counters` is the file with the numbers of requests of all clients.
    """

    model: EngineModel
    index: int
    addresses: dict[str, str]
    input_fd: int
    output_fd: int
    counters: str
    debug: bool


class Offer(msgspec.Struct, array_like=True):
    """Properties of the instance of a ready client."""

    adapters: tuple[str, ...]
    max_model_len: int
    places: int


_encode = msgspec.msgpack.Encoder().encode
_settings = msgspec.msgpack.Decoder(ClientSettings).decode
_offer = msgspec.msgpack.Decoder(Offer).decode


def write(value: ClientSettings | Offer) -> bytes:
    """Settings or an offer as bytes."""
    return _encode(value)


def read_settings(payload: bytes) -> ClientSettings:
    """The settings that `write` encoded."""
    return _settings(payload)


def read_offer(payload: bytes) -> Offer:
    """The offer that `write` encoded."""
    return _offer(payload)


class ClientKind(InferenceKind):
    """Kinds of frames between the server and a client; the server numbers the calls."""

    SETTINGS = 16  # `ClientSettings`: the first frame to a client
    READY = 17  # `Offer`
    FAILED = 18  # an error: the client cannot serve
    WASTED = 19  # the number of tokens made for a cancelled request
    STOPPED = 20  # the reason, as text: the engine has stopped
    LOG = 21  # a log record of the client


class RecordSender(logging.Handler):
    """Sends log records of all threads of this process, on its event loop."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self._send = send
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; dropped if the event loop is closed."""
        try:
            payload = orjson.dumps(_fields(record), default=str, option=orjson.OPT_NON_STR_KEYS)
        except (TypeError, ValueError):
            self.handleError(record)
            return
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send, payload)


def relay(payload: bytes) -> None:
    """Log a received record in this process."""
    record = logging.makeLogRecord(orjson.loads(payload))
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields = {key: value for key, value in vars(record).items() if key not in OMITTED}
    fields["msg"] = record.getMessage()
    if record.exc_info:
        fields["trace"] = _formatter.formatException(record.exc_info)
    return fields
