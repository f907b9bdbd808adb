"""The service of a request, as the fair queue gets it."""

import weakref
from dataclasses import replace
from typing import Any

import pytest

from gateway.messages import Phases, Usage
from gateway.observability.request_record import Record
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.service import OUTPUT, Service, charge_each
from tests.builders import text_response


class Reader:
    """Keeps the tokens that were charged."""

    def __init__(self) -> None:
        self.charged: list[tuple[str, int]] = []

    def prompted(self, service: Service, usage: Usage) -> None:
        self.charged.append(("prompt", usage.prompt_tokens))

    def made(self, service: Service, kind: str, tokens: int) -> None:
        self.charged.append((kind, tokens))


def test_each_token_of_an_answer_is_charged_once() -> None:
    reader: Any = Reader()
    record = Record(ModelStatistics(), 1, 0, lambda _: None)
    service = record.reader = Service(reader, reader, record, "a", "a")
    record.responded(replace(text_response("a"), usage=Usage(7, 2)))
    record.responded(text_response("b"))
    record.delivered("text_output", [b"c", b"d"], [1, None])
    record.responded(replace(text_response("e"), usage=Usage(0, 3)))
    assert reader.charged == [("prompt", 7), (OUTPUT, 2), (OUTPUT, 1), (OUTPUT, 3)]
    assert (service.outputs, service.has_tokens) == (6, True)


def test_the_service_of_an_ended_request_holds_no_scheduler() -> None:
    """A receipt that is kept has the record, and the record the service."""

    class Owner:
        count = 0

        def freed(self, service: Service) -> None:
            self.count += 1

        def ended(self, service: Service) -> None:
            self.count += 10

    owner, reader = Owner(), Reader()
    record = Record(ModelStatistics(), 1, 0, lambda _: None)
    service = Service(owner, reader, record, "a", "a")  # type: ignore[arg-type]
    service.freed()
    service.ended()
    service.freed()
    assert owner.count == 11
    alive = weakref.ref(owner)
    del owner
    assert alive() is None


class Passing:
    """Has what is noted, and keeps the records that are charged by a call."""

    def __init__(self) -> None:
        self.noted: list[Record] = []
        self.charged: list[Record] = []

    def executed(self, record: Record, phases: Phases, rows: int) -> None:
        self.noted.clear()  # as a settled ledger
        self.charged.append(record)


@pytest.mark.parametrize(
    ("noted", "charged"), [("xabc", ""), ("abcx", "cba"), ("abxc", "ba"), ("bc", "a"), ("", "cba")]
)
def test_records_of_a_batch_are_charged_by_a_call_if_others_are_noted_behind_their_ends(
    noted: str, charged: str
) -> None:
    reader: Any = Passing()
    records = {name: Record(ModelStatistics(), 1, 0, lambda _: None) for name in "abcx"}
    for each in records.values():
        each.reader, each.ended_ns = reader, 1
    reader.noted.extend(records[name] for name in noted)
    charge_each([records[name] for name in "abc"], Phases(), 3)
    assert reader.charged == [records[name] for name in charged]
    behind = {name for name in "abc" if records[name].execution is not None}
    assert behind == {*"abc"} - {*charged}
