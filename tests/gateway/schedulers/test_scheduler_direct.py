"""The default scheduler: first in, first out, each request an execution of its own."""

from dataclasses import replace

from tests.builders import TEXT, read_all, settle, soon
from tests.gateway.conftest import Start
from tests.gateway.schedulers.queues import asked, finish


async def test_requests_are_not_combined_although_the_model_batches(start: Start) -> None:
    queue = start(replace(TEXT, max_batch_size=8))
    instance = queue.employ()
    entries = queue.submit("a", "b", "c")
    for text, entry in zip("abc", entries, strict=True):
        execution = await instance.begun()
        assert asked(execution) == [text]
        finish(execution)
        assert await soon(read_all(entry.stream)) == [text]
    await settle()
    assert len(instance.executions) == 3
