"""Readers of recordings."""

from gateway.messages import InferResponse
from gateway.resumption.reader import EventId, RecordingReader
from gateway.resumption.recordings import Recordings
from tests.builders import Execution, soon, text_response, texts
from tests.gateway.resumption.conftest import PLACE

MOMENT = 0.01


async def rest(reader: RecordingReader) -> list[str]:
    """The responses that a reader still gets, to the end."""
    found: list[InferResponse] = []
    while batch := await soon(reader.batch()):
        found += batch
    return texts(found)


async def one(reader: RecordingReader) -> str:
    """The only response that is there."""
    (found,) = texts(await soon(reader.batch()))
    return found


def say(execution: Execution, *words: str) -> None:
    for word in words:
        execution.answer(text_response(word))


def back(recordings: Recordings, token: str, number: int) -> RecordingReader:
    return recordings.resume(EventId(token, number), PLACE)
