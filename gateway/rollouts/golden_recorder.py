"""Golden requests recorded from the requests of clients, which are asked again meanwhile."""

import asyncio
import base64
import io
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, StreamRecorder, responses_of_texts
from gateway.models.golden.answer import ExpectedAnswer, GoldenAnswer
from gateway.models.golden.data import Array
from gateway.models.golden.recorded import GoldenDraft, NotRecordable
from gateway.models.golden.tensor_checks import Mismatch
from gateway.models.golden.text_checks import Unsearched, redacted
from gateway.models.model import Model
from gateway.observability.request_record import Record
from gateway.observability.statistics import ModelStatistics
from gateway.observability.stream_tap import StreamTap, Tap
from gateway.rollouts.comparison import MOST_BYTES, TensorKeeper
from gateway.rollouts.copying import copied, why_not_copied
from gateway.stream import ResponseStream
from gateway.threads import Threads

log = logging.getLogger("sluice.recording")

MOST_REQUESTS = 1000
MOST_SECS = 3600.0
MOST_LINE_BYTES = 64 << 20
"""Bytes of the lines of one recording."""
MOST_AT_ONCE = 8
"""Requests of clients that are kept at a time; others are dropped."""
ASKED = 3
"""The number of times that a request is asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingLimits:
    """The number of requests and the seconds of a recording; `redact` is a pattern, "" for none."""

    count: int
    secs: float
    redact: str = ""


class GoldenRecorder:
    """Makes golden requests of the requests to one model; implements `Tapper`.

    Requests are recorded from its creation to `end`, which leaving its `with` block calls. One task
    calls `next`. A recorded request is asked again at the lowest priority, and in no statistics.
    """

    def __init__(self, model: Model, limits: RecordingLimits, threads: Threads) -> None:
        if model.recorder is not None:
            text = f"model '{model.name}' version {model.version} is being recorded"
            raise InferenceError(Code.ALREADY_EXISTS, f"{text}; end that recording first")
        if any(each.of_fleet or each.statistics.calls for each in _tree(model)):
            text = f"requests to model '{model.name}' make requests to other servers or models"
            raise InferenceError(Code.UNSUPPORTED, f"{text}, which would be repeated")
        self.reason = ""
        """The reason of the end."""
        self._model = model
        self._limits = limits
        self._threads = threads
        self._statistics = ModelStatistics.of(model.config)
        self._recorded = self._bytes = 0
        self._dropped: Counter[str] = Counter()
        self._known: set[bytes] = set()
        self._open: set[_RecordedStream] = set()
        self._answered: deque[_RecordedStream] = deque()
        self._asked: ResponseStream | None = None
        loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] = loop.create_future()
        self._timer = loop.call_later(limits.secs, self.end, "the time is over")
        model.recorder = self
        log.info("recording begun", extra={**self._about, "count": limits.count})

    def __enter__(self) -> "GoldenRecorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.end("the client has disconnected")

    # Tapper.

    def tap(self, request: InferRequest, tap: Tap | None) -> Tap | None:
        """The tap of a request that may be recorded, else the given one."""
        reason = why_not_copied(request)
        room = min(MOST_AT_ONCE, self._limits.count - self._recorded)
        if not reason and len(self._open) >= room:
            reason = "others were being recorded"
        if reason:
            self.drop(reason)
            return tap
        return _RecordedStream(self, request, tap)

    def end(self, reason: str) -> None:
        """Record no more requests, and cancel the one that is asked again."""
        if self.reason:
            return
        self.reason = reason
        self._model.recorder = None
        self._timer.cancel()
        self._open.clear()
        self._answered.clear()
        if self._asked is not None:
            self._asked.cancel()
        self._notify()
        log.info(
            "recording ended",
            extra={
                **self._about,
                "reason": reason,
                "recorded": self._recorded,
                "dropped": self._dropped.total(),
            },
        )

    # Its streams.

    def begin(self, stream: "_RecordedStream") -> None:
        """Count an accepted request."""
        self._open.add(stream)

    def answered(self, stream: "_RecordedStream") -> None:
        """Queue a request that has its answer."""
        if stream in self._open:
            self._answered.append(stream)
            self._notify()

    def drop(self, reason: str, stream: "_RecordedStream | None" = None) -> None:
        """Count a request that is not recorded."""
        self._dropped[reason] += 1
        if stream is not None:
            self._open.discard(stream)

    # Lines.

    async def next(self) -> bytes | None:
        """The line of the next golden request; None once the recording has ended."""
        while not self.reason:
            if self._recorded == self._limits.count:
                self.end("all are recorded")
            elif not self._answered:
                self._wake = asyncio.get_running_loop().create_future()
                await self._wake
            elif (line := await self._try(self._answered.popleft())) is not None:
                return line
        return None

    def counts(self) -> bytes:
        """A line with the counts; after the end it has the reason."""
        found: dict[str, Any] = {"recorded": self._recorded, "dropped": self._dropped}
        return _line({**found, "end": self.reason} if self.reason else found)

    @property
    def _about(self) -> dict[str, str]:
        return {"model": self._model.name, "version": self._model.version}

    def _notify(self) -> None:
        if not self._wake.done():
            self._wake.set_result(None)

    async def _try(self, stream: "_RecordedStream") -> bytes | None:
        """The line of a request; None if it is dropped."""
        try:
            line = await self._record(stream)
        except NotRecordable as reason:
            if not self.reason:
                self.drop(str(reason), stream)
            return None
        self._open.discard(stream)
        if self.reason or self._bytes + len(line) > MOST_LINE_BYTES:
            self.end(f"the next one has more than the {MOST_LINE_BYTES >> 20} MiB of a recording")
            return None
        self._bytes += len(line)
        self._recorded += 1
        return line

    async def _record(self, stream: "_RecordedStream") -> bytes:
        draft = await self._threads.run(GoldenDraft, stream.request, self._model.config)
        if self._limits.redact:
            texts = await self._threads.run(draft.texts)
            await self._threads.run(draft.redact, await self._redacted(texts))
        request = await self._threads.run(draft.request)
        digest = await self._threads.run(draft.digest)
        if digest in self._known:
            raise NotRecordable("recorded already")
        answers, secs = [], 0.0
        for _ in range(ASKED):
            began = time.monotonic()
            answers.append(await self._ask(request))
            secs = max(secs, time.monotonic() - began)
        if not draft.changed:
            answers.append(stream.answer)
        clean: Mapping[str, str] = {}
        if self._limits.redact:
            texts = await self._threads.run(draft.answer_texts, answers)
            clean = dict(zip(texts, await self._redacted(texts), strict=True))
        expected = await self._threads.run(draft.complete, answers, clean, secs)
        await _check(expected, answers[:ASKED])
        self._known.add(digest)
        return await self._threads.run(_golden_line, draft)

    async def _redacted(self, texts: Sequence[str]) -> list[str]:
        try:
            return await redacted(self._limits.redact, texts)
        except Unsearched as error:
            raise NotRecordable(f"the pattern to redact {error}") from None

    async def _ask(self, request: InferRequest) -> GoldenAnswer:
        answer = GoldenAnswer()
        if self.reason or self._model.retired:
            raise NotRecordable("the recording has ended")
        try:
            self._asked = self._model.copy(copied(request, self._model), self._statistics)
        except InferenceError as error:
            raise NotRecordable(f"refused when asked again: {error.code.value}") from None
        try:
            await answer.read(self._asked)
        finally:
            self._asked = None
        if self.reason:
            raise NotRecordable("the recording has ended")
        if answer.error is not None:
            raise NotRecordable(f"failed when asked again: {answer.error.code.value}")
        return answer


class _RecordedStream(StreamTap):
    """A request of a client and its answer."""

    def __init__(self, recorder: GoldenRecorder, request: InferRequest, tap: Tap | None) -> None:
        super().__init__(tap)
        self.request = request
        self.answer = GoldenAnswer()
        self._recorder = recorder
        self._keeper = TensorKeeper()

    def recorder(self, record: Record, account: StreamRecorder) -> StreamRecorder:
        """See `Tap`."""
        self._recorder.begin(self)
        return super().recorder(record, account)

    def responded(self, response: InferResponse) -> None:
        """Keep a response."""
        self.account.responded(response)
        self._keep(response)

    def delivered(self, name: str, texts: Sequence[bytes], tokens: Sequence[int | None]) -> None:
        """As `responded` of each."""
        self.account.delivered(name, texts, tokens)
        for response in responses_of_texts(name, texts, tokens):
            self._keep(response)

    def ended(self, error: InferenceError | None) -> None:
        """Queue the request, or drop one that failed."""
        self.account.ended(error)
        error = error or self.answer.error
        if error is None and self._keeper.is_whole:
            self._recorder.answered(self)
            return
        reason = f"an answer of more than {MOST_BYTES >> 20} MiB"
        if error is not None:
            reason = f"failed: {error.code.value}"
        self._recorder.drop(reason, self)

    def _keep(self, response: InferResponse) -> None:
        """Keep the outputs within the limit; an answer beyond it is dropped as a whole."""
        answer, is_shared = self.answer, bool(response.shared_bytes)
        answer.error = answer.error or response.error
        outputs = [self._keeper.keep(each, copied=is_shared) for each in response.outputs]
        if self._keeper.is_whole:
            whole = tuple([each for each in outputs if each is not None])
            answer.responses.append(replace(response, outputs=whole))
        else:
            answer.responses.clear()


async def _check(expected: ExpectedAnswer, answers: Sequence[GoldenAnswer]) -> None:
    """Refuse a golden request that its own answers do not pass."""
    try:
        for each in answers:
            await expected.check(each, _compare_by_no_model)
    except Mismatch:
        raise NotRecordable("answers differ") from None


async def _compare_by_no_model(model: str, one: str, other: str) -> float:
    raise AssertionError("no check of a recorded request needs a model")


def _golden_line(draft: GoldenDraft) -> bytes:
    """The line of a golden request, its arrays as NPY files in base64."""
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    golden = {**draft.members, "why": f"recorded {now}"}
    return _line({"golden": golden, "arrays": {k: _npy(v) for k, v in draft.arrays.items()}})


def _npy(array: Array) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode()


def _line(members: Mapping[str, Any]) -> bytes:
    return json.dumps(members, ensure_ascii=False).encode() + b"\n"


def _tree(model: Model) -> Iterator[Model]:
    """A model, and those that it calls as an ensemble."""
    yield model
    for each in model.members:
        yield from _tree(each)
