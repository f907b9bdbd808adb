"""Requests of a model besides inference: metrics, other models, lines in the server's log."""

from collections.abc import Callable
from typing import Any

import pytest

from backends.python.worker.sluice_worker.protocol import ToGateway, ToWorker
from tests.backends.python.worker.gateway import PlayedGateway, code, request, told

Number = Callable[[], int]
REFUSED = "Failed to process the request for model 'm_0_0', message: "


def begin(gateway: PlayedGateway, number: int, text: str) -> None:
    header, data = code(text)
    gateway.begin(request(number, header), buffers=[data])


def text_of(gateway: PlayedGateway) -> str:
    error, answers, body = gateway.executed()
    assert error is None, error
    return bytes(gateway.arrays(answers[0][1][0], body)["y"])[4:].decode()


def answered(gateway: PlayedGateway, kind: ToGateway, error: Any, value: Any) -> list[Any]:
    """Answer a call; what it said besides its number."""
    call, *said = gateway.hear(kind).values
    gateway.say(ToWorker.DONE, call, error, value)
    return said


@pytest.mark.parametrize(
    ("asked", "kind", "said"),
    [
        ("load_model('a')", ToGateway.LOAD_MODEL, ["a", "", []]),
        ("unload_model('a', True)", ToGateway.UNLOAD_MODEL, ["a", True]),
        ("is_model_ready('a', '2')", ToGateway.MODEL_READY, ["a", "2"]),
    ],
)
@pytest.mark.parametrize("error", [None, "the core says no"])
def test_other_models_can_be_managed(
    probed: PlayedGateway,
    number: Number,
    asked: str,
    kind: ToGateway,
    said: list[Any],
    error: str | None,
) -> None:
    begin(probed, number(), f"return [texts(caught(lambda: pb_utils.{asked}))]")
    assert answered(probed, kind, error, True if error is None else None) == said
    what = {"l": "load model", "u": "unload model", "i": "check model readiness"}[asked[0]]
    refusal = f"TritonModelException: Failed to {what}: {REFUSED}{error}"
    done = "True" if asked[0] == "i" else "None"
    assert text_of(probed) == (done if error is None else refusal)


def test_files_of_a_model_are_sent_with_its_load(probed: PlayedGateway, number: Number) -> None:
    text = "pb_utils.load_model('a', '{}', {'file:1/a': b'xy', 'file:1/b': b''})"
    begin(probed, number(), f"{text}\nreturn [texts('loaded')]")
    heard = probed.hear(ToGateway.LOAD_MODEL)
    assert heard.values[1:] == ["a", "{}", [["file:1/a", 2], ["file:1/b", 0]]]
    assert bytes(heard.body) == b"xy"
    probed.say(ToWorker.DONE, heard.values[0], None, None)
    assert text_of(probed) == "loaded"


def test_files_are_a_dictionary_of_bytes(probed: PlayedGateway, number: Number) -> None:
    text = """
load = pb_utils.load_model
return [texts(caught(load, "a", "", [1]), caught(load, "a", files={"a": 1}))]
"""
    assert told(probed, number(), text) == [
        "TritonModelException: failed to load model 'a', files should be a dictionary of file "
        "paths and file contents",
        "TypeError: Object of type 'int' is not an instance of 'bytes'",
    ]


def test_a_line_for_the_log_names_its_place(probed: PlayedGateway, number: Number) -> None:
    text = """
log = pb_utils.Logger
log.log("a")
log.log("b", log.VERBOSE)
log.log_info("c"); log.log_warn("d"); log.log_error("e"); log.log_verbose("\\udc80")
return [texts(caught(log.log, 5)[:9], caught(log.log, "x", 5)[:9])]
"""
    assert told(probed, number(), text) == ["TypeError", "TypeError"]
    lines = [probed.hear(ToGateway.LOG).values for _ in range(6)]
    assert [each[:2] for each in lines] == [
        *(["INFO", "a"], ["VERBOSE", "b"], ["INFO", "c"], ["WARNING", "d"], ["ERROR", "e"]),
        ["VERBOSE", "?"],
    ]
    assert [each[3] for each in lines[:2]] == [4, 5]
    assert lines[0][2] == "<string>"


def test_metrics_are_made_changed_and_read(probed: PlayedGateway, number: Number) -> None:
    text = """
F = pb_utils.MetricFamily
family = F(name="requests", description="how many", kind=F.COUNTER)
metric = family.Metric(labels={"a": "b"})
metric.increment(2)
seen = [caught(metric.increment, -1), caught(metric.set, 1), caught(metric.observe, 1)]
seen += [repr(metric.value())]
del metric, family
return [texts("\\n".join(seen))]
"""
    begin(probed, number(), text)
    family, *rest = answered(probed, ToGateway.METRIC_FAMILY, None, None)
    assert rest == ["requests", "how many", "counter"]
    found, metric, *rest = answered(probed, ToGateway.METRIC, None, None)
    assert (found, rest) == (family, [{"a": "b"}, []])
    assert probed.hear(ToGateway.METRIC_CHANGE).values == [metric, "increment", 2.0]
    assert answered(probed, ToGateway.METRIC_VALUE, None, 2.5) == [metric]
    kind = "TRITONSERVER_METRIC_KIND_COUNTER"
    assert text_of(probed).split("\n") == [
        f"TritonModelException: Failed to increment metric value: {REFUSED}{kind} can only be "
        "incremented monotonically by non-negative values.",
        f"TritonModelException: Failed to set metric value: {REFUSED}{kind} does not support Set",
        f"TritonModelException: Failed to observe metric value: {REFUSED}{kind} does not support "
        "Observe",
        "2.5",
    ]
    assert probed.hear(ToGateway.METRIC_GONE).values == [family, metric]
    assert probed.hear(ToGateway.METRIC_GONE).values == [family, 0]


def test_a_histogram_observes(probed: PlayedGateway, number: Number) -> None:
    text = """
F = pb_utils.MetricFamily
family = F("sizes", "d", F.HISTOGRAM)
family.Metric(None, [1.0, 5]).observe(3)
return [texts("\\n".join([caught(family.Metric), caught(family.Metric, None, (1,))]))]
"""
    begin(probed, number(), text)
    answered(probed, ToGateway.METRIC_FAMILY, None, None)
    said = answered(probed, ToGateway.METRIC, None, None)
    assert said[2:] == [{}, [1.0, 5]]
    assert probed.hear(ToGateway.METRIC_CHANGE).values == [said[1], "observe", 3.0]
    assert text_of(probed).split("\n") == [
        "TritonModelException: Failed to create metric. Missing required buckets.",
        "TritonModelException: Failed to create metric. Buckets must be a list.",
    ]
    assert [probed.hear(ToGateway.METRIC_GONE).values[1] for _ in range(2)] == [said[1], 0]


def test_invalid_metrics_are_refused(probed: PlayedGateway, number: Number) -> None:
    text = """
F = pb_utils.MetricFamily
seen = [caught(F, "n", "d", 5)[:9]]
family = F("n", "d", F.GAUGE)
seen += [caught(family.Metric, 5), caught(family.Metric, {"a": 1}), caught(family.Metric, {}, [1])]
metric = family.Metric()
seen += [caught(metric.set, float("inf"))]
del family
seen += [caught(metric.set, 1), caught(F, "m", "d", F.GAUGE)]
return [texts("\\n".join(seen))]
"""
    begin(probed, number(), text)
    answered(probed, ToGateway.METRIC_FAMILY, None, None)
    answered(probed, ToGateway.METRIC, None, None)
    answered(probed, ToGateway.METRIC_FAMILY, "Invalid metric name", None)
    fails = "TritonModelException: "
    assert text_of(probed).split("\n") == [
        "TypeError",
        f"{fails}Failed to create metric. Labels must be a dictionary.",
        f"{fails}Error when creating Metric: {REFUSED}attempt to access JSON non-string as string",
        f"{fails}Failed to create metric. Unexpected buckets found.",
        f"{fails}Failed to set metric value: {REFUSED}a metric cannot stand at inf",
        f"{fails}Failed to set metric value: Invalid metric operation as the corresponding "
        "'MetricFamily' has been deleted. The 'MetricFamily' object should be deleted AFTER its "
        "corresponding 'Metric' objects have been deleted.",
        f"{fails}Error when creating MetricFamily: {REFUSED}Invalid metric name",
    ]
    # The family has dropped its series: no further message names it.
    assert probed.hear(ToGateway.METRIC_GONE).values[1] == 0
    assert probed.rest(ToGateway.METRIC_GONE) == []
