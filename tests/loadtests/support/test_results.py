"""Lines, figures and rounds as the file of results has them."""

from pathlib import Path

import orjson

from loadtests.support.results import Line, Results, machine, quantile, save

LINE = Line("add_sub HTTP", "infer", 8)


def test_a_line_has_the_figures_of_each_side_with_median_and_spread() -> None:
    results = Results()
    for per_sec in (1.0, 2.0, 4.0):
        results.add("gateway", LINE.costs(per_sec, 50.0))
    results.add("triton", LINE.costs(8.0, 100.0))
    (line,) = results.as_lines()
    assert (line["line"], line["unit"]) == ("add_sub HTTP, 8 clients", "infer")
    rate, spent = line["figures"]["rate"], line["figures"]["processor time"]
    assert (rate["unit"], rate["better"]) == ("infer/s", "higher")
    assert (spent["unit"], spent["better"]) == ("us/infer", "lower")
    assert rate["sides"]["gateway"] == {"median": 2.0, "spread": 1.5, "rounds": [1.0, 2.0, 4.0]}
    assert rate["sides"]["triton"] == {"median": 8.0, "spread": None, "rounds": [8.0]}


def test_a_file_of_results_has_the_date_the_machine_and_its_python(tmp_path: Path) -> None:
    results = Results()
    results.add("gateway", LINE.costs(1.0, 1.0))
    lines = {"lines": results.as_lines()}
    path = save("tensors", {"rounds": 1}, lines, tmp_path / "to.json")
    found = orjson.loads(path.read_bytes())
    assert found.keys() == {"test", "arguments", "date", "machine", "lines"}
    assert found["lines"] == lines["lines"]
    assert isinstance(machine()["optimized"], bool)
    assert found["machine"].keys() >= {"cpu", "cpus", "python", "optimized", "packages"}


def test_a_quantile_is_one_of_the_values_in_any_order() -> None:
    values = [float(each) for each in (3, 1, 4, 2)]
    assert [quantile(values, share) for share in (0, 0.5, 0.99, 1)] == [1, 3, 4, 4]
    assert quantile([], 0.99) == 0


def test_a_ratio_is_the_median_of_the_ratios_of_rounds() -> None:
    results = Results()
    for ours, theirs in ((2.0, 1.0), (30.0, 10.0), (8.0, 2.0)):
        results.add("gateway", LINE.costs(ours, 0.0))
        results.add("triton", LINE.costs(theirs, 0.0))
    assert results.ratio(LINE.rate, "gateway", "triton") == 3.0
    assert results.ratio(LINE.processor_time, "gateway", "triton") is None
    assert results.ratio(LINE.rate, "gateway", "vllm") is None
