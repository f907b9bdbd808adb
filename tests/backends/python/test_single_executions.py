"""Executions of one request without a task, in real workers."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.python.codec import MUCH_BYTES
from backends.python.quarantine import Quarantine
from backends.python.single_executions import WorkerSingles
from gateway.backend import Instance, Note, NotSent, SingleExecutions
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.stream import ResponseStream
from tests.backends.python.loading import DECOUPLED, TWICE, Load, request, soon, values
from tests.backends.python.played import ANSWER, BODY, Ends, Played
from tests.builders import death_of
from tests.serving import wait_until

LOOKS = """
    def execute(self, requests):
        (request,) = requests
        (HERE / "begun").touch()
        deadline = time.monotonic() + 20
        while not request.is_cancelled() and time.monotonic() < deadline:
            time.sleep(0.005)
        (HERE / "told").write_text(str(request.is_cancelled()))
        return [response(x(request))]
"""


def singles(instance: Instance) -> SingleExecutions:
    assert instance.singles is not None
    return instance.singles


class Notes:
    """The reader of an execution: notes its answers, and its end."""

    def __init__(self) -> None:
        self.answers: list[InferResponse | InferenceError | Note] = []
        self.at_put: list[bool] = []
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def put(self, ended: bool) -> None:
        """Note whether the execution had ended when its sink got the answer."""
        self.at_put.append(ended)

    def take(self, answer: InferResponse | InferenceError | Note) -> None:
        assert not self.ended.done()
        self.answers.append(answer)

    def over(self, error: Exception | None) -> None:
        self.ended.set_result(error)


def asked(stream: ResponseStream, *of: float) -> InferRequest:
    """A request as an execution passes it on."""
    return request(*of, sink=stream, cancellation=stream)


async def test_the_answer_goes_to_the_sink_before_the_end(load: Load) -> None:
    instance = await load(TWICE)
    for number in range(3):
        notes, stream = Notes(), ResponseStream()
        asking = asked(stream, number)
        stream.listen(lambda notes=notes: notes.put(notes.ended.done()))
        assert singles(instance).accepts(asking)
        singles(instance).begin(asking, notes)
        assert await soon(notes.ended) is None
        assert notes.at_put == [False]
        (answer,) = stream.take() or ()
        assert answer.final
        assert values((0, answer)) == [2 * number]
        assert set(notes.answers) <= {Note.FREED}


class Begins(Notes):
    """Begins the next execution as its own one ends."""

    def __init__(self, begin: Callable[[], object]) -> None:
        super().__init__()
        self._begin = begin

    def over(self, error: Exception | None) -> None:
        super().over(error)
        self._begin()


async def test_an_execution_may_begin_in_the_end_of_the_one_before(load: Load) -> None:
    instance, streams = await load(TWICE), [ResponseStream() for _ in range(20)]
    last = following = Notes()
    for number in reversed(range(1, len(streams))):
        asking = asked(streams[number], number)
        following = Begins(partial(singles(instance).begin, asking, following))
    singles(instance).begin(asked(streams[0], 0), following)
    assert await soon(last.ended) is None
    found = [answer for stream in streams for answer in stream.take() or ()]
    assert [values((0, each)) for each in found] == [[2 * number] for number in range(20)]


async def test_large_requests_and_those_of_decoupled_models_are_not_begun(load: Load) -> None:
    instance = await load(TWICE)
    assert not singles(instance).accepts(request(*np.zeros(MUCH_BYTES // 4)))
    decoupled = await load(TWICE, DECOUPLED)
    assert decoupled.singles is None


async def test_a_suspect_is_not_begun_and_others_are(load: Load) -> None:
    instance: Any = await load(TWICE)
    known, code = instance._quarantine, instance._code  # noqa: SLF001 - as a crash leaves them
    known.died(code, [request(7)])
    assert not singles(instance).accepts(request(7))
    assert singles(instance).accepts(request(8))


async def test_a_request_that_becomes_a_suspect_meanwhile_is_cleared(load: Load) -> None:
    instance: Any = await load(TWICE)
    known, code = instance._quarantine, instance._code  # noqa: SLF001 - as a crash leaves them
    notes = Notes()
    singles(instance).begin(asked(ResponseStream(), 7), notes)
    known.died(code, [request(7), request(8)])
    assert await soon(notes.ended) is None
    assert (known.is_suspect(code, request(7)), known.is_suspect(code, request(8))) == (False, True)


async def test_an_error_of_the_model_is_its_answer(load: Load) -> None:
    instance = await load("""
    def execute(self, requests):
        raise ValueError("no such number")
""")
    notes = Notes()
    singles(instance).begin(asked(ResponseStream(), 1), notes)
    assert await soon(notes.ended) is None
    (error,) = [each for each in notes.answers if each is not Note.FREED]
    assert isinstance(error, InferenceError)
    assert "no such number" in error.message


async def test_the_end_of_the_worker_is_its_answer(load: Load) -> None:
    instance = await load("""
    def execute(self, requests):
        os._exit(3)
""")
    notes = Notes()
    singles(instance).begin(asked(ResponseStream(), 1), notes)
    assert await soon(notes.ended) is None
    (error,) = notes.answers
    assert isinstance(error, InferenceError)
    assert error.code is Code.UNAVAILABLE
    await soon(death_of(instance))
    with pytest.raises(NotSent):
        singles(instance).begin(asked(ResponseStream(), 1), Notes())


async def begun(instance: Instance, folder: Path) -> tuple[Any, ResponseStream, Notes]:
    """An execution that the model has begun."""
    notes, stream = Notes(), ResponseStream()
    execution = singles(instance).begin(asked(stream, 1), notes)
    await asyncio.to_thread(wait_until, (folder / "begun").exists, "execute has begun")
    return execution, stream, notes


async def test_an_abandoned_execution_is_over_once_execute_has_returned(
    load: Load, tmp_path: Path
) -> None:
    instance, folder = await load(LOOKS), tmp_path / "m" / "1"
    execution, stream, notes = await begun(instance, folder)
    execution.abandon()
    execution.abandon()
    assert not notes.ended.done()
    assert await soon(notes.ended) is None
    assert (folder / "told").read_text() == "True"
    assert (stream.take(), notes.answers) == (None, [])


async def test_a_client_that_disconnects_is_seen_by_the_model(load: Load, tmp_path: Path) -> None:
    instance, folder = await load(LOOKS), tmp_path / "m" / "1"
    _, stream, notes = await begun(instance, folder)
    stream.cancel()
    assert await soon(notes.ended) is None
    assert (folder / "told").read_text() == "True"
    assert notes.answers == []


async def test_a_request_that_stops_is_answered_by_the_model(load: Load, tmp_path: Path) -> None:
    instance, folder = await load(LOOKS), tmp_path / "m" / "1"
    _, stream, notes = await begun(instance, folder)
    stream.stop()
    assert await soon(notes.ended) is None
    assert [values((0, each)) for each in stream.take() or ()] == [[1]]


async def test_a_request_cancelled_before_it_begins(load: Load, tmp_path: Path) -> None:
    instance, folder = await load(LOOKS), tmp_path / "m" / "1"
    notes, stream = Notes(), ResponseStream()
    stream.cancel()
    singles(instance).begin(asked(stream, 1), notes)
    assert await soon(notes.ended) is None
    assert (folder / "told").read_text() == "True"
    assert notes.answers == []


async def test_an_error_of_the_sink_is_that_of_the_execution(load: Load) -> None:
    instance, notes, stream = await load(TWICE), Notes(), ResponseStream()
    stream.listen(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    singles(instance).begin(asked(stream, 1), notes)
    assert isinstance(await soon(notes.ended), ZeroDivisionError)
    following = Notes()
    singles(instance).begin(asked(ResponseStream(), 1), following)
    assert await soon(following.ended) is None


async def test_an_error_of_the_reader_is_that_of_the_execution(load: Load) -> None:
    class Fails(Notes):
        def take(self, answer: InferResponse | InferenceError | Note) -> None:
            raise LookupError("no place")

    instance, notes = await load(TWICE), Fails()
    singles(instance).begin(request(1), notes)
    assert isinstance(await soon(notes.ended), LookupError)


async def test_a_request_whose_tensors_cannot_be_shared_does_not_begin(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance: Any = await load(TWICE)

    def fails(*_: object) -> Any:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(instance._executions._encoder, "write", fails)  # noqa: SLF001
        with pytest.raises(InferenceError, match="no memory can be shared") as caught:
            singles(instance).begin(asked(ResponseStream(), 1), Notes())
    assert caught.value.code is Code.INTERNAL
    notes = Notes()
    singles(instance).begin(asked(ResponseStream(), 1), notes)
    assert await soon(notes.ended) is None


async def test_an_answer_waits_for_those_of_an_earlier_execution(ends: Ends) -> None:
    played, notes = Played(ends), Notes()
    executions, numbers = played.executions, (1, 2)
    mine = WorkerSingles(executions, Quarantine(), b"")
    earlier = await executions.begin([request(1)], [0])
    assert mine.accepts(request(2))
    mine.begin(request(2), notes)
    for number in numbers:
        answers = [[number, ANSWER, True, False]]
        executions.take_executed([5, number, None, answers, 1000], BODY)
    assert not mine.accepts(request(3)), "there is an unread answer"
    executions.after_read()
    assert set(notes.answers) <= {Note.FREED}
    assert not notes.ended.done()
    assert len(earlier.take()) == 1
    assert isinstance(notes.answers[-1], InferResponse)
    assert notes.ended.done()
    executions.release(earlier)


async def test_a_note_that_has_its_execution_looked_at_again_ends_it_once(ends: Ends) -> None:
    played = Played(ends)
    mine = WorkerSingles(played.executions, Quarantine(), b"")

    class Closes(Notes):
        def take(self, answer: InferResponse | InferenceError | Note) -> None:
            super().take(answer)
            begun.look()

    notes, asking = Closes(), request(1)
    begun: Any = mine.begin(asking, notes)
    played.executed(1)
    assert notes.ended.done()
    assert len([each for each in notes.answers if each is not Note.FREED]) == 1


async def test_an_error_of_the_end_disturbs_no_other_execution(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(Notes):
        def over(self, error: Exception | None) -> None:
            raise LookupError("no place")

    played, others = Played(ends), Notes()
    mine = WorkerSingles(played.executions, Quarantine(), b"")
    mine.begin(request(1), Fails())
    mine.begin(request(2), others)
    played.executed(1, 2)
    assert others.ended.done()
    assert [each.message for each in caplog.records] == ["end of an execution failed"]
