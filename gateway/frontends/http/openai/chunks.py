"""A model's responses as OpenAI's clients get them: its bytes, framed and not looked into."""

from collections.abc import Iterable, Sequence

from gateway.errors import Code, InferenceError
from gateway.frontends.http.openai.errors import written
from gateway.frontends.http.resumable import id_line
from gateway.frontends.http.sse import event
from gateway.messages import InferResponse
from gateway.openai_contract import EVENT, RESPONSE, Endpoint
from gateway.resumption.reader import EventId
from gateway.stream import INTERRUPTED, Interrupted

DONE = event(b"[DONE]")


class ChunkEncoder:
    """Encodes the responses of one request."""

    def __init__(self, model: str, endpoint: Endpoint) -> None:
        self._model = model
        self._named = endpoint is Endpoint.RESPONSES

    @property
    def end(self) -> bytes:
        """What tells the client that nothing more comes; streams of named events have none."""
        return b"" if self._named else DONE

    def whole(self, response: InferResponse) -> bytes:
        """The JSON in a response; INTERNAL if the model has sent something else."""
        output = response.output(RESPONSE)
        elements = () if output is None else output.elements()
        if len(elements) != 1:
            raise InferenceError(
                Code.INTERNAL,
                f"model '{self._model}' answered with {len(elements)} elements in '{RESPONSE}', "
                "expected 1",
            )
        return elements[0]

    def events(self, responses: Sequence[InferResponse]) -> bytes:
        """An event for each response with data, each error, and one for an interruption."""
        return b"".join([self._event(response) for response in responses])

    def numbered_events(self, responses: Iterable[tuple[EventId, InferResponse]]) -> bytes:
        """The same with their ids."""
        return b"".join(
            [(id_line(e) if found.outputs else b"") + self._event(found) for e, found in responses]
        )

    def failure(self, error: InferenceError) -> bytes:
        """The event that says that the rest will not come."""
        _, body = written(error)
        return (b"event: error\n" if self._named else b"") + event(body)

    def _event(self, response: InferResponse) -> bytes:
        if response.outputs:
            return self._chunk(response)
        if response.error is not None:
            return self.failure(response.error)
        # Without a word the answer would look whole.
        return self.failure(Interrupted()) if response == INTERRUPTED else b""

    def _chunk(self, response: InferResponse) -> bytes:
        chunk = self.whole(response)
        if b"\n" in chunk or b"\r" in chunk:
            # A field of an event is one line; the client puts them together again.
            chunk = b"\ndata: ".join(chunk.splitlines())
        name = response.parameters.get(EVENT) if response.parameters else None
        return event(chunk) if name is None else b"event: %b\n" % str(name).encode() + event(chunk)
