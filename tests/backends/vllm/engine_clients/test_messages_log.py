"""Log lines of a process without a log of its own, in the log of its server."""

import asyncio
import logging
from collections.abc import Iterator
from threading import Thread

import pytest

from backends.vllm.engine_clients.messages import RecordSender, relay
from tests.builders import settle

THERE = logging.getLogger("there.engine")


class Kept(logging.Handler):
    """Keeps the records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def here() -> Iterator[Kept]:
    """The lines under the same name in the server's log, from INFO on."""
    logger, kept = logging.getLogger("here.engine"), Kept()
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    yield kept
    logger.removeHandler(kept)


@pytest.fixture
async def told() -> "Iterator[list[bytes]]":
    found: list[bytes] = []
    handler = RecordSender(found.append)
    THERE.addHandler(handler)
    THERE.setLevel(logging.DEBUG)
    THERE.propagate = False
    yield found
    THERE.removeHandler(handler)


def passed(payload: bytes) -> None:
    """As if both processes named it the same: here the names must differ."""
    relay(payload.replace(b'"there.engine"', b'"here.engine"'))


async def test_a_record_comes_with_its_fields(told: list[bytes], here: Kept) -> None:
    THERE.info("%s ready", "engine", extra={"model": "llama", "secs": 1.5, "folders": {1: "x"}})
    await settle()
    (payload,) = told
    passed(payload)
    (record,) = here.records
    assert record.getMessage() == "engine ready"
    assert (record.levelno, record.filename) == (logging.INFO, "test_messages_log.py")
    assert vars(record)["model"] == "llama"
    assert vars(record)["secs"] == 1.5


async def test_a_percent_sign_stays_what_it_is(told: list[bytes], here: Kept) -> None:
    THERE.warning("100 %% of %s", "it")
    await settle()
    passed(told[0])
    assert here.records[0].getMessage() == "100 % of it"


async def test_a_traceback_comes_as_text(told: list[bytes], here: Kept) -> None:
    try:
        raise ValueError("why")
    except ValueError:
        THERE.exception("failed")
    await settle()
    passed(told[0])
    assert "ValueError: why" in vars(here.records[0])["trace"]
    assert here.records[0].exc_info is None


async def test_a_value_that_is_no_json_comes_as_text(told: list[bytes], here: Kept) -> None:
    THERE.error("odd", extra={"thing": ValueError("text of it")})
    await settle()
    passed(told[0])
    assert vars(here.records[0])["thing"] == "text of it"


async def test_other_threads_log_too(told: list[bytes], here: Kept) -> None:
    thread = Thread(target=THERE.error, args=("from a thread",))
    thread.start()
    await asyncio.to_thread(thread.join)
    await settle()
    passed(told[0])
    assert here.records[0].getMessage() == "from a thread"


async def test_a_record_that_cannot_be_sent_is_printed_to_stderr(
    told: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    THERE.error("too large", extra={"number": 1 << 70})
    await settle()
    assert told == []
    assert "too large" in capsys.readouterr().err


async def test_a_record_below_the_log_level_is_not_logged(told: list[bytes], here: Kept) -> None:
    THERE.debug("detail")
    await settle()
    passed(told[0])
    assert here.records == []
