"""Metrics of models: shared by name, exposed once, dropped with the last holder."""

import pytest
from prometheus_client.core import Metric

from backends.python.metrics import MetricStore
from gateway.errors import InferenceError

ONE, TWO = object(), object()


def samples(metrics: list[Metric]) -> dict[str, float]:
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())):
        sample.value
        for metric in metrics
        for sample in metric.samples
    }  # fmt: skip


def shown(store: MetricStore, *holders: object) -> dict[str, float]:
    return samples([metric for holder in holders for metric in store.exposed_for(holder)])


def test_two_holders_share_a_series_which_is_shown_once() -> None:
    store = MetricStore()
    for holder in (ONE, TWO):
        family = store.family("requests", "How many", "counter", holder)
        store.series(family, {"kind": "a"}, (), holder).value += 2
    assert shown(store, ONE) == {"requests,kind=a": 4.0}
    assert shown(store, TWO) == {}


def test_the_next_holder_exposes_it_after_the_first() -> None:
    store = MetricStore()
    found = {}
    for holder in (ONE, TWO):
        family = store.family("requests", "How many", "gauge", holder)
        found[holder] = family, store.series(family, {}, (), holder)
    found[ONE][1].value = 3
    store.drop_series(*found[ONE], ONE)
    assert shown(store, TWO) == {"requests": 3.0}
    store.drop_series(*found[TWO], TWO)
    assert shown(store, ONE, TWO) == {}


def test_a_family_starts_again_after_its_last_holder() -> None:
    store = MetricStore()
    family = store.family("requests", "How many", "counter", ONE)
    store.drop_family(family, ONE)
    assert store.family("requests", "Another", "gauge", TWO) is not family


def test_a_histogram_counts_in_cumulative_buckets() -> None:
    store = MetricStore()
    family = store.family("latency", "Seconds", "histogram", ONE)
    series = store.series(family, {}, (0.1, 1.0), ONE)
    for value in (0.05, 0.1, 0.5, 7.0):
        series.observe(value)
    assert shown(store, ONE) == {
        "latency_bucket,le=0.1": 2,
        "latency_bucket,le=1": 3,
        "latency_bucket,le=+Inf": 4,
        "latency_count": 4,
        "latency_sum": pytest.approx(7.65),
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("two words", "counter"), ("", "counter"), ("a", "summary"), ("1a", "gauge")),
        ("nv_inference_count", "counter"),
    ],
)
def test_a_metric_that_cannot_be_exposed_is_refused(name: str, kind: str) -> None:
    with pytest.raises(InferenceError, match="Invalid metric name"):
        MetricStore().family(name, "", kind, ONE)


def test_one_name_has_one_kind() -> None:
    store = MetricStore()
    store.family("requests", "How many", "counter", ONE)
    store.family("requests", "Described otherwise", "counter", TWO)
    with pytest.raises(InferenceError, match="Family name already exists with different type"):
        store.family("requests", "How many", "gauge", TWO)


@pytest.mark.parametrize("label", ["", "a-b", "__name", "1a"])
def test_a_label_needs_a_name_that_the_format_allows(label: str) -> None:
    store = MetricStore()
    family = store.family("requests", "How many", "counter", ONE)
    with pytest.raises(InferenceError, match="is no name for a label"):
        store.series(family, {label: "x"}, (), ONE)


def test_buckets_must_ascend() -> None:
    store = MetricStore()
    family = store.family("latency", "Seconds", "histogram", ONE)
    with pytest.raises(InferenceError, match="not in ascending order"):
        store.series(family, {}, (2.0, 1.0), ONE)
