"""A stream of OpenAI's, as server-sent events."""

from collections.abc import Mapping, Sequence

from gateway.errors import InferenceError
from gateway.frontends.http.openai.chunks import ChunkEncoder
from gateway.frontends.http.sse import EventStream, First
from gateway.messages import InferResponse
from gateway.resumption.reader import RecordingReader, Responses
from gateway.settings import HttpSettings


class ChunkedResponse(EventStream):
    """The events of one request; an error becomes the last one but `[DONE]`."""

    def __init__(
        self,
        stream: Responses,
        first: First,
        encoder: ChunkEncoder,
        settings: HttpSettings,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(stream, first, settings, headers)
        self._encoder = encoder

    def encode_batch(self, batch: Sequence[InferResponse]) -> bytes:
        if isinstance(self._stream, RecordingReader):
            return self._encoder.numbered_events(self._stream.numbered(batch))
        return self._encoder.events(batch)

    def encode_failure(self, error: InferenceError) -> bytes:
        return self._encoder.failure(error)

    def encode_end(self) -> bytes:
        return self._encoder.end
