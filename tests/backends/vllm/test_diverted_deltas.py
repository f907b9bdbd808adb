"""Outputs that have more than tokens are left to vLLM's output processor."""

from types import SimpleNamespace
from typing import Any, get_type_hints

import numpy as np
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

ID = "a"


class Detokenizer:
    stop = ()

    def update(self, tokens: list[int], stop_terminated: bool) -> None:
        self.count = len(tokens)

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        return "x" * self.count


class Processor:
    """Notes the outputs that reach it."""

    def __init__(self) -> None:
        self.left: list[Any] = []

    def process_outputs(
        self,
        engine_core_outputs: Any,
        engine_core_timestamp: float | None = None,
        iteration_stats: Any = None,
        weight_version: str | None = None,
    ) -> None:
        self.left += engine_core_outputs


def steps_of(processor: Processor, texts: list[str]) -> tuple[Any, Any]:
    """The steps in front of a processor, and the diverted deltas of the request that waits."""
    from backends.vllm.diverted_deltas import DivertedDeltas, DivertedSteps

    state = SimpleNamespace(
        request_id=ID, detokenizer=Detokenizer(), stats=None, weight_version_starts=[]
    )
    collector, sink = SimpleNamespace(output=None), SimpleNamespace(has_room=True)
    steps = DivertedSteps(processor)
    deltas = DivertedDeltas(
        state,
        collector,
        steps,
        lambda text, tokens: texts.append(text),
        sink,  # type: ignore[arg-type]
    )
    deltas.waiting = True
    return steps, deltas


def of_type(hint: str) -> Any:
    """A value that a member with this annotation may have, and that is no default."""
    import torch

    if "ndarray" in hint:
        return np.zeros(2)
    return torch.zeros(2) if "torch.Tensor" in hint else ["x"]


def test_an_output_with_any_other_member_is_left() -> None:
    from vllm.v1.engine import EngineCoreOutput

    processor, texts = Processor(), list[str]()
    _, deltas = steps_of(processor, texts)
    others = EngineCoreOutput.__struct_fields__[2:]
    hints = {name: str(hint) for name, hint in EngineCoreOutput.__annotations__.items()}
    assert "routed_experts" in others
    outputs = [EngineCoreOutput(ID, [5], **{name: of_type(hints[name])}) for name in others]
    processor.process_outputs([*outputs, EngineCoreOutput(ID, [5, 6]), EngineCoreOutput(ID, [])])
    assert [id(each) for each in processor.left[:-1]] == [id(each) for each in outputs]
    assert texts == ["xx"]
    assert deltas.taken() == [5, 6]


def test_texts_of_a_step_are_written_behind_the_last_one_of_them() -> None:
    """And before the outputs that are left: those end a text."""
    from vllm.v1.engine import EngineCoreOutput

    from gateway.event_loop import WRITES

    events: list[str] = []
    transport: Any = SimpleNamespace(
        is_closing=lambda: False, write=lambda data: events.append(f"written {data}")
    )
    processor = Processor()

    class Texts(list[str]):
        def append(self, text: str) -> None:
            events.append(f"made {text}")
            assert WRITES.collected is not None
            WRITES.collected.append((transport, text.encode()))

    steps_of(processor, Texts())
    processor.process_outputs([EngineCoreOutput(ID, [5]), EngineCoreOutput(ID, [5, 6])])
    assert events == ["made x", "made xx", "written b'x'", "written b'xx'"]
    assert processor.left == []


def test_outputs_are_left_once_their_request_has_ended() -> None:
    from vllm.v1.engine import EngineCoreOutput

    processor, texts = Processor(), list[str]()
    steps, deltas = steps_of(processor, texts)
    deltas.end()
    deltas.end()
    processor.process_outputs([EngineCoreOutput(ID, [5])])
    assert (len(processor.left), texts, steps.requests) == (1, [], {})


def test_the_names_in_use_are_those_of_a_request() -> None:
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
    from vllm.v1.engine.output_processor import RequestState

    from backends.vllm.diverted_deltas import OF_DETOKENIZER, OF_STATE

    names = RequestState.__init__.__code__.co_names
    assert {*OF_STATE} <= {*names, *get_type_hints(RequestState)}
    assert {*OF_DETOKENIZER} <= {
        *BaseIncrementalDetokenizer.__init__.__code__.co_names,
        *vars(BaseIncrementalDetokenizer),
    }
