"""A model that is driven by hand, and recordings of what it says."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from gateway.models.model import Model
from gateway.policy.caller import Caller
from gateway.resumption.reader import RecordingReader
from gateway.resumption.recording import Key, RecordedRequest
from gateway.resumption.recordings import Recordings
from gateway.settings import ResumptionSettings
from tests.builders import DECOUPLED, TEXT, Execution, ScriptedInstance, text_request
from tests.conftest import Serve

LLM = replace(TEXT, name="llm", model_transaction_policy=DECOUPLED)
PLACE = "/v2/models/llm/generate_stream"

Keep = Callable[..., Recordings]


class Llm:
    """A decoupled model, and what it has been asked."""

    def __init__(self, serve: Serve) -> None:
        self.instance = ScriptedInstance()
        self.model: Model = serve(self.instance, config=LLM)

    def ask(
        self,
        recordings: Recordings,
        text: str = "hello",
        key: Key | None = None,
        caller: Caller | None = None,
    ) -> RecordingReader:
        """A recorded request."""
        request = text_request(text, model=self.model.name, caller=caller)
        asked = RecordedRequest(PLACE, self.model, request, key)
        return recordings.open(asked, lambda: self.model.submit(request))

    async def begun(self) -> Execution:
        """The next execution."""
        return await self.instance.begun()


@pytest.fixture
async def llm(serve: Serve) -> Llm:
    """The model."""
    found = Llm(serve)
    found.instance.concurrency = None
    return found


@pytest.fixture
async def keep(serve: Serve) -> AsyncIterator[Keep]:
    """Makes recordings that are dropped when the test ends."""
    made: list[Recordings] = []

    def make(**settings: float) -> Recordings:
        made.append(Recordings(ResumptionSettings(**{"grace_secs": 60.0, **settings})))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for recordings in made:
        recordings.drain()
        assert recordings.reading().recordings == 0, "somebody still reads"


@pytest.fixture
async def recordings(keep: Keep) -> Recordings:
    """Recordings that wait for long."""
    return keep()
