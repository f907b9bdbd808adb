"""Series of one engine: invocations of tool parsers, steps, and several clients."""

import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.backends.vllm.conftest import MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

CLIENTS = """
import os
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry
from backends.vllm.metrics import SharedMetrics, StepGauge, StepTime

def write(secs, running):
    if child := os.fork():
        os.waitpid(child, 0)
        return
    StepGauge.step = StepTime()
    StepGauge.step.secs = secs
    options = {"multiprocess_mode": "mostrecent", "registry": CollectorRegistry()}
    StepGauge("running", "", **options).set(running)
    os._exit(0)

write(11.0, 0)
write(10.0, 1)
families = SharedMetrics("m", "1", Path(sys.argv[1])).collect()
print([sample.value for family in families for sample in family.samples])
"""
"""Two clients of an engine, of which the one with the older step is later."""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def parser(store: Path) -> type:
    """The class of vLLM's parser for the calls of the model."""
    from vllm.parser import ParserManager

    found: type = ParserManager.get_parser(tool_parser_name="hermes", enable_auto_tools=True)
    return found


@pytest.fixture(scope="module")
def tokenizer(store: Path) -> Any:
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(str(store / MODEL))


def counted(metrics: Any) -> dict[tuple[str, ...], float]:
    """The samples that are not 0, by model, mode, outcome and type of the request."""
    names = ("model_name", "mode", "outcome", "request_type")
    return {
        tuple(sample.labels[name] for name in names): sample.value
        for family in metrics.collect()
        for sample in family.samples
        if sample.name == "vllm:tool_call_parser_invocations_total" and sample.value
    }


def engine(name: str, parser: type) -> tuple[Any, Any]:
    """The metrics of a model, and vLLM's state whose parser they count."""
    from backends.vllm.metrics import EngineMetrics

    metrics = EngineMetrics(name, "1", triton_names=False)
    state = SimpleNamespace(openai_serving_chat=SimpleNamespace(parser_cls=parser))
    metrics.count_tool_calls(state, name)
    return metrics, state.openai_serving_chat


def test_each_model_counts_its_own_invocations(parser: type, tokenizer: Any) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    (first, chat), (second, _) = engine("first", parser), engine("second", parser)
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}
    request = ChatCompletionRequest.model_validate(asked)
    made = chat.parser_cls(tokenizer, request.tools)
    assert made.extract_tool_calls(CALL, request).tools_called
    assert not made.extract_tool_calls("It rains.", request=request).tools_called
    made.extract_tool_calls_streaming("", "It", "It", [], [1], [1], request)
    kind = "chat_completions"
    assert counted(first) == {
        ("first", "non_streaming", "tool_call", kind): 1,
        ("first", "non_streaming", "no_tool_call", kind): 1,
        ("first", "streaming", "no_tool_call", kind): 1,
    }
    assert counted(second) == {}


def test_every_series_begins_with_0(parser: type) -> None:
    metrics, _ = engine("first", parser)
    samples = [
        sample.value
        for family in metrics.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    ]
    assert samples == [0.0] * (2 * 2 * 3 + 2)  # parsers of tool calls, and ways of outputs


def test_a_parser_that_vllm_does_not_count_is_not_counted(parser: type, tokenizer: Any) -> None:
    class Own(parser):  # type: ignore[misc,valid-type] # a class that only vLLM knows
        def extract_tool_calls(self, model_output: str, request: Any) -> Any:
            return SimpleNamespace(tools_called=True)

    metrics, chat = engine("first", Own)
    assert chat.parser_cls(tokenizer, None).extract_tool_calls("x", None).tools_called
    assert counted(metrics) == {}


@pytest.mark.parametrize("seed", range(20))
def test_values_of_a_step_are_observed_as_one_by_one(seed: int) -> None:
    from prometheus_client import CollectorRegistry, Histogram

    from backends.vllm.metrics import StepHistogram

    chance = random.Random(seed)
    different = [0.0, 0.5, 1.0, 4.0, 9.0, *(chance.choice((0.25, 0.75)) for _ in range(3))]
    values = chance.choices(different, k=chance.randrange(40))
    found, expected = (
        kind("h", "", ["engine"], buckets=(0.5, 1, 4), registry=CollectorRegistry())
        for kind in (StepHistogram, Histogram)
    )
    found.labels("0").observe_each(values)
    for value in values:
        expected.labels("0").observe(value)
    (found_family,), (expected_family,) = found.collect(), expected.collect()
    of_found, of_expected = (
        [
            (each.name, each.labels, each.value)
            for each in family.samples
            if "created" not in each.name
        ]
        for family in (found_family, expected_family)
    )
    assert of_found == of_expected
    assert found_family.type == "histogram"


@pytest.mark.release
def test_a_gauge_of_several_clients_has_the_value_of_the_newest_step(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLIENTS, str(tmp_path)],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[0.0]\n", done.stderr
