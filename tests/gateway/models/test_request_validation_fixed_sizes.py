"""The fast check agrees with the full checks."""

import random
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import InferenceError
from gateway.messages import InferRequest, RequestedOutput, SharedRegion
from gateway.models.request_validation import MAX_BYTES, FixedSizeRequests, RequestRules
from gateway.tensor import SIZES, Datatype, Tensor

ROUNDS = 3000


def declared(
    name: str, data_type: DataType = DataType.TYPE_FP32, dims: tuple[int, ...] = (2, 3)
) -> ModelInput:
    return ModelInput(name=name, data_type=data_type, dims=dims)


def model(*inputs: ModelInput, max_batch_size: int = 4) -> ModelConfig:
    outputs = tuple(
        ModelOutput(name=name, data_type=DataType.TYPE_FP32, dims=(1,)) for name in "YZ"
    )
    return ModelConfig(name="m", max_batch_size=max_batch_size, input=inputs, output=outputs)


TWO = model(declared("A"), declared("B", DataType.TYPE_INT64, (1,)))
CONFIGS = [
    TWO,
    replace(TWO, max_batch_size=0),
    model(declared("A", dims=())),
    model(declared("A", dims=()), max_batch_size=0),
    model(declared("A"), declared("B", DataType.TYPE_STRING, (1,))),
    model(declared("A"), declared("B", DataType.TYPE_BF16, (-1,))),
    model(declared("A"), replace(declared("B"), optional=True)),
    model(declared("A", dims=(2, 0))),
    model(declared("A", DataType.TYPE_FP64, (2**32, 2**27)), max_batch_size=4),
    model(),
]


def plain(config: ModelConfig, request: InferRequest) -> int:
    return FixedSizeRequests(config, MAX_BYTES).batch_size(request)


def size(shape: tuple[int, ...], datatype: Datatype) -> int:
    count = SIZES.get(datatype, 4)
    for dim in shape:
        count *= max(0, dim)
    return min(count, 1 << 12)


def tensor(name: str, datatype: Datatype, shape: tuple[int, ...], extra: int = 0) -> Tensor:
    return Tensor(name, datatype, shape, b"\0" * max(0, size(shape, datatype) + extra))


def request_for(config: ModelConfig, rows: int = 1) -> InferRequest:
    """One that has exactly what the config says."""
    batch = (rows,) if config.batching else ()
    inputs = [tensor(each.name, each.datatype, (*batch, *each.dims)) for each in config.input]
    return InferRequest(model="m", inputs=tuple(inputs))


def disturbed(request: InferRequest, chance: random.Random) -> InferRequest:
    """The same with something changed, which may make it unfit, or not."""
    inputs = list(request.inputs)
    place = chance.randrange(len(inputs)) if inputs else 0
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda old: replace(old, name=chance.choice("ABC")),
        lambda old: tensor(old.name, chance.choice(list(Datatype)), old.shape),
        lambda old: tensor(old.name, old.datatype, old.shape[1:]),
        lambda old: tensor(old.name, old.datatype, (chance.randrange(-2, 7), *old.shape[1:])),
        lambda old: tensor(old.name, old.datatype, (*old.shape, chance.randrange(-1, 3))),
        lambda old: tensor(old.name, old.datatype, old.shape, chance.choice([-4, -1, 1, 4])),
    ]
    kind = chance.randrange(len(changes) + 5)
    if inputs and kind < len(changes):
        inputs[place] = changes[kind](inputs[place])
    elif inputs and kind == len(changes):
        del inputs[place]
    elif inputs and kind == len(changes) + 1:
        inputs.append(chance.choice(inputs))
    elif kind == len(changes) + 2:
        chance.shuffle(inputs)
    names = chance.choices("YZX", k=chance.randrange(4))
    return replace(
        request, inputs=tuple(inputs), outputs=tuple(RequestedOutput(name) for name in names)
    )


def test_the_fast_check_agrees_with_every_check() -> None:
    # A request that fails the fast check gets the full checks, so only a pass can be wrong.
    chance, seen = random.Random(3), 0
    for _ in range(ROUNDS):
        config = chance.choice(CONFIGS)
        request = request_for(config, rows=chance.randrange(6))
        for _ in range(chance.randrange(3)):
            request = disturbed(request, chance)
        if rows := plain(config, request):
            seen += 1
            assert carefully(config, request) == rows, request
    assert seen > ROUNDS // 20


def carefully(config: ModelConfig, request: InferRequest) -> int | None:
    """The answer of the checks one by one; None if they refuse the request."""
    # A model with an input of variable size has no fast check.
    unlike = ModelInput(name="other", data_type=DataType.TYPE_STRING, dims=(1,), optional=True)
    rules = RequestRules(replace(config, input=(*config.input, unlike)))
    try:
        return rules.check(request)
    except InferenceError:
        return None


@pytest.mark.parametrize("rows", [1, 4])
def test_a_request_as_configured_passes_the_fast_check(rows: int) -> None:
    assert plain(TWO, request_for(TWO, rows)) == rows


def test_inputs_may_have_any_order() -> None:
    request = request_for(TWO)
    assert plain(TWO, replace(request, inputs=request.inputs[::-1])) == 1


def test_a_model_that_does_not_batch_has_batches_of_one() -> None:
    config = replace(TWO, max_batch_size=0)
    assert plain(config, request_for(config)) == 1


@pytest.mark.parametrize("config", CONFIGS[4:])
def test_sizes_that_are_open_or_none_are_for_the_checks(config: ModelConfig) -> None:
    if config.input and config.input[-1].optional:
        request = InferRequest(model="m", inputs=request_for(config).inputs[:1])
    else:
        request = request_for(config)
    assert plain(config, request) == 0


def test_a_batch_without_a_batch_dimension_is_for_the_checks() -> None:
    config = model(declared("A", dims=()))
    request = InferRequest(model="m", inputs=(tensor("A", Datatype.FP32, ()),))
    assert plain(config, request) == 0


def test_outputs_are_checked_again_if_they_differ_from_the_latest() -> None:
    fast = FixedSizeRequests(TWO, MAX_BYTES)
    inputs = (tensor("A", Datatype.FP32, (1, 2, 3)), tensor("B", Datatype.INT64, (1, 1)))

    def batch_size(*names: str) -> int:
        asked = tuple(RequestedOutput(name) for name in names)
        request = InferRequest(model="m", inputs=inputs, outputs=asked)
        found = fast.batch_size(request)
        assert fast.batch_size(request) == found
        return found

    found = [batch_size(*names) for names in (("Y",), ("X",), (), ("Y", "Z"), ("Y", "Y"), ("Y",))]
    assert found == [1, 0, 1, 1, 0, 1]


def test_outputs_in_shared_memory_are_not_kept() -> None:
    class Memory:
        pass

    fast, memory = FixedSizeRequests(TWO, MAX_BYTES), Memory()
    asked = (RequestedOutput("Y", region=SharedRegion("r", 8, memory=memory)),)
    request = replace(request_for(TWO), outputs=asked)
    assert [fast.batch_size(request) for _ in range(2)] == [1, 1]
    left = weakref.ref(memory)
    del request, asked, memory
    assert left() is None
