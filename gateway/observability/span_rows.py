"""Rows of numbers in place of usual traces, and the spans of many rows, written column by column.

A server under load traces thousands of requests per second whose spans differ in ids and times
only. As columns their spans take a tenth of the time that as many traces take one by one.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from gateway.observability.otlp_wire import attributes, numbered
from gateway.observability.span_trace import SpanTrace
from gateway.observability.spans import (
    MOST_FORMS,
    REQUEST_ID,
    TRACE_NUMBER,
    row_of,
    row_values,
    usual_spans,
)
from gateway.observability.trace import ANSWERED, WireStamps
from gateway.observability.traceparent import NumberedIds, epoch_offset_ns

SPANS_OF_ROW = 3
"""`InferRequest`, the span of the model, and `compute`."""
FIXED = 8
"""The numbers of a row in front of its events."""
NUMBER_BYTES = 8
FEW = 8
"""Fewer rows are written one by one: as columns they would take longer."""
BITS = 7
"""Those of a number in one byte of a message."""
LOW_BITS = np.uint64((1 << BITS) - 1)
TRACE, ROOT, FIRST, LAST, VARINT, STARTED, ENDED, TIMES = 0, 2, 5, 6, 7, 8, 10, 15
"""Places of values in a table; an id of a trace has two. Behind the varint they are as in a row."""
IDS = TRACE, ROOT, ROOT + 1, ROOT + 2
BELOW_ROOT = [np.uint64(each) for each in range(3)]
PHASES = 5, 6, 7
"""The numbers of a row that are durations."""


class SpanRows:
    """The usual traces of one version of a model and one wire, as rows that wait.

    The event loop adds rows at the end, the thread of the exporter takes some from the front. A row
    is the number of its trace, its times, and the id of its request in UTF-8.
    """

    __slots__ = ("_form", "_has_ids", "_numbers", "_pack", "_rows")

    def __init__(self, wire: WireStamps, model: str, version: str) -> None:
        names = *wire.received, ANSWERED, *wire.sent
        self._form = names, model, version
        self._numbers = Struct(f"<{FIXED + len(names)}q")
        self._pack = self._numbers.pack
        self._has_ids = False
        self._rows: list[bytes] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, trace: SpanTrace) -> None:
        """Add a complete trace with all stamps and a printable id of its request.

        Raises `struct.error` if its times are no numbers.
        """
        phases = trace.phases
        row = self._pack(
            trace.id,
            trace.started_ns,
            trace.queued_ns,
            trace.ended_ns,
            trace.executed_ns,
            phases.input_ns,
            phases.infer_ns,
            phases.output_ns,
            trace.begun_ns,
            trace.whole_ns,
            trace.answered_ns,
            trace.sending_ns,
            trace.sent_ns,
        )
        if trace.request_id:
            row += trace.request_id.encode()
            self._has_ids = True
        self._rows.append(row)

    def take(self, most: int) -> list[bytes]:
        """Remove the oldest rows, at most `most`."""
        taken = self._rows[:most]
        del self._rows[:most]
        return taken

    def spans(self, rows: Sequence[bytes], ids: NumberedIds) -> tuple[list[bytes], list[bytearray]]:
        """The spans of rows as messages of OTLP: of few rows one by one, of many in tables."""
        if not self._has_ids:
            groups = [rows]
        else:
            groups = [[row for row in rows if len(row) == size] for size in set(map(len, rows))]
        spans: list[bytes] = []
        tables: list[bytearray] = []
        for same in groups:
            if len(same) < FEW:
                spans += [span for row in same for span in self._spans_of(row, ids)]
            else:
                tables += self._tables(same, ids)
        return spans, tables

    def _spans_of(self, row: bytes, ids: NumberedIds) -> list[bytes]:
        number, *stamps = self._numbers.unpack_from(row)
        more = _more(number, row[self._numbers.size :])
        return usual_spans(row_of(*self._form, len(more)), ids.of(number), stamps, more)

    def _tables(self, rows: Sequence[bytes], ids: NumberedIds) -> Iterator[bytearray]:
        """The spans of rows of one size, in a table for each size of the numbers of traces."""
        width, size, read = FIXED + len(self._form[0]), len(rows[0]), b"".join(rows)
        columns = np.ndarray((len(rows), width), np.int64, read, strides=(size, NUMBER_BYTES))
        numbers = columns[:, 0]
        least, most = _varint_size(int(numbers.min())), _varint_size(int(numbers.max()))
        if least == most:
            yield _table(*self._form, least, size).spans(columns, read, ids)
            return
        for each in range(least, most + 1):
            same = [row for row in rows if _varint_size(self._numbers.unpack_from(row)[0]) == each]
            if same:
                yield from self._tables(same, ids)


class SpanTable:
    """The bytes that the spans of many requests have in common, and the places of the others.

    A request has a row of values: the ids of its trace and of its spans, the start and the end of
    the first one, the varint of its number, and the times of its row in `SpanRows`. Each operation
    is on one column: on more than 500 numbers numpy gives the interpreter lock to the event loop,
    and waits for it, which takes longer.
    """

    def __init__(
        self, names: tuple[str, ...], model: str, version: str, number_size: int, row_size: int
    ) -> None:
        number, id_size = (
            1 << BITS * (number_size - 1),
            row_size - NUMBER_BYTES * (FIXED + len(names)),
        )
        number_end, more = len(_more(number, b"")), _more(number, b"x" * id_size)
        row = row_of(names, model, version, len(more))
        moments = [FIRST, LAST, *range(STARTED, TIMES + len(names))]
        places, common, id_at = [], [], 0
        for (at, code), value in zip(row.fields, row_values(IDS, moments, VARINT), strict=True):
            common.append(0 if code == "Q" else more if value == VARINT else b"")
            if value == VARINT:
                places.append((at + number_end - number_size, f"V{number_size}", value))
                id_at = at + len(more) - id_size
            elif value == TRACE:
                places += [(at, ">u8", value), (at + NUMBER_BYTES, ">u8", value + 1)]
            else:
                places.append((at, "<u8" if code == "Q" else ">u8", value))
        self._common = bytearray().join(row.messages(common))
        self._width = TIMES + len(names)
        self._to = _record([(at, kind) for at, kind, _ in places], len(self._common))
        values = [(NUMBER_BYTES * n, kind.replace(">", "<")) for _, kind, n in places]
        self._from = _record(values, NUMBER_BYTES * self._width)
        self._has_ids, text = id_size > 0, f"V{id_size}"
        self._id_to = _record([(id_at, text)], len(self._common))
        self._id_from = _record([(row_size - id_size, text)], row_size)
        self._further = [_further_byte(byte) for byte in range(1, number_size)]

    def spans(self, columns: NDArray[np.int64], rows: bytes, ids: NumberedIds) -> bytearray:
        """The spans of rows of `SpanRows`, whose numbers are the columns."""
        count, width = columns.shape
        values = np.empty((count, self._width), np.int64)
        self._identify(values.view(np.uint64), columns[:, 0].view(np.uint64), ids)
        offset_ns = epoch_offset_ns()
        for column in (1, 2, 3, 4, *range(FIXED, width)):
            values[:, VARINT + column] = columns[:, column] + offset_ns
        for column in PHASES:  # each begins when the one before it ends
            values[:, VARINT + column] = values[:, VARINT + column - 1] + columns[:, column]
        values[:, FIRST] = np.minimum(values[:, STARTED], values[:, TIMES])
        values[:, LAST] = np.maximum(values[:, ENDED], values[:, -1])
        table: bytearray = self._common * count
        np.frombuffer(table, self._to)[:] = values.view(self._from)[:, 0]
        if self._has_ids:
            np.frombuffer(table, self._id_to)[:] = np.frombuffer(rows, self._id_from)
        return table

    def _identify(
        self, values: NDArray[np.uint64], numbers: NDArray[np.uint64], ids: NumberedIds
    ) -> None:
        """Set the ids of requests, and the varints of their numbers."""
        values[:, TRACE], values[:, TRACE + 1], root = ids.columns(numbers)
        for below in range(3):
            values[:, ROOT + below] = root + BELOW_ROOT[below]
        varints = numbers & LOW_BITS
        for bits, shift, more in self._further:
            varints |= (numbers & bits) << shift
            varints |= more
        values[:, VARINT] = varints


def _record(places: Sequence[tuple[int, str]], size: int) -> np.dtype[np.void]:
    """The type of a record of that size, with a field of a type at each of the places."""
    offsets, formats = [at for at, _ in places], [kind for _, kind in places]
    names = [*map(str, range(len(places)))]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})


def _further_byte(byte: int) -> tuple[np.uint64, np.uint64, np.uint64]:
    """The bits of a number in a further byte of its varint, their shift, and what announces it."""
    bits = (1 << BITS) - 1 << BITS * byte
    return np.uint64(bits), np.uint64(byte), np.uint64(1 << 8 * byte - 1)


def _varint_size(number: int) -> int:
    """The bytes of a number in a message; at most 8 of that of a trace, which are counted."""
    return max(1, -(-number.bit_length() // BITS))


@lru_cache(MOST_FORMS)
def _table(
    names: tuple[str, ...], model: str, version: str, number_size: int, id_size: int
) -> SpanTable:
    return SpanTable(names, model, version, number_size, id_size)


def _more(number: int, request_id: bytes) -> bytes:
    """The attributes of the span of a model that differ."""
    found = numbered(TRACE_NUMBER, number)
    return found + attributes({REQUEST_ID: request_id.decode()}) if request_id else found
