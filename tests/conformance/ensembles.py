"""The ensembles that the servers of the tests serve, and the models that they call."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.conformance.models import DECOUPLED, NEVER_US, with_parameters
from tests.serving import write_model

Names = Sequence[str]


INT32 = "INT32 2"
"""A kind of tensors: their datatype and their dims."""


def tensors(role: str, names: Names, kind: str) -> str:
    """Inputs or outputs of one kind; a name that ends in ? is optional."""
    datatype, _, dims = kind.partition(" ")
    return "".join(
        f'{role} {{ name: "{name.rstrip("?")}" data_type: TYPE_{datatype} dims: [{dims}]'
        f"{' optional: true' if name.endswith('?') else ''} }}\n"
        for name in names
    )


def leaf(
    inputs: Names = ("IN",),
    outputs: Names = ("OUT",),
    kind: str = INT32,
    more: str = "",
    **parameters: object,
) -> str:
    """A model that answers each of its inputs as the output in its place."""
    return (
        'backend: "identity"\n'
        + tensors("input", inputs, kind)
        + tensors("output", outputs, kind)
        + with_parameters(parameters)
        + more
    )


def step(model: str, reads: Mapping[str, str], writes: Mapping[str, str], version: int = -1) -> str:
    """A call of a model: from its tensors to those of the ensemble."""
    entry = '{} {{ key: "{}" value: "{}" }}\n'
    maps = [entry.format("input_map", *each) for each in reads.items()]
    maps += [entry.format("output_map", *each) for each in writes.items()]
    return f'step {{ model_name: "{model}" model_version: {version}\n{"".join(maps)} }}\n'


def calls(model: str, source: str, target: str, version: int = -1) -> str:
    """A call of a model with one input and one output."""
    return step(model, {"IN": source}, {"OUT": target}, version)


def ensemble(
    *steps: str,
    inputs: Names = ("X",),
    outputs: Names = ("Y",),
    kind: str = INT32,
    out: str = "",
    more: str = "",
) -> str:
    """The config of an ensemble; its outputs are of the kind `out`, or that of its inputs."""
    return (
        'platform: "ensemble"\n'
        + tensors("input", inputs, kind)
        + tensors("output", outputs, out or kind)
        + f"ensemble_scheduling {{ {''.join(steps)} }}\n"
        + more
    )


BATCH_4 = "max_batch_size: 4\n"
BATCH_8 = "max_batch_size: 8\n"
CACHED = "response_cache { enable: true }\n"
JOIN = step("ab", {"A": "l", "B": "r"}, {"P": "Y"})

MEMBERS = {
    "a": leaf(),
    "b": leaf(),
    "ab": leaf("AB", "PQ"),
    "opt": leaf(("A", "B?"), "PQ"),
    "failing": leaf(fail="no way"),
    "stuck": leaf(delay_us=NEVER_US),
    "stuck2": leaf(delay_us=NEVER_US),
    "dec": leaf(responses=3, more=DECOUPLED),
    "dec2": leaf(responses=2, more=DECOUPLED),
    "fp": leaf(kind="FP32 2"),
    "three": leaf(kind="INT32 3"),
    "any": leaf(kind="INT32 -1"),
    "bat4": leaf(more=BATCH_4),
    "bat8": leaf(more=BATCH_8 + "dynamic_batching { }\n"),
    "lead1": leaf(kind="INT32 1, 2"),
    "cachy": leaf(more=CACHED),
    "labels": leaf().replace('name: "OUT"', 'name: "OUT" label_filename: "labels.txt"'),
    "badload": leaf(load_fails="no weights"),
}
SERVED = {
    "ok": ensemble(calls("a", "X", "m"), calls("b", "m", "Y")),
    "backwards": ensemble(calls("b", "m", "Y"), calls("a", "X", "m")),
    "two_out": ensemble(
        calls("a", "X", "m"), calls("b", "m", "Y"), calls("any", "m", "Z"), outputs="YZ"
    ),
    "fork": ensemble(calls("a", "X", "l"), calls("b", "X", "r"), JOIN),
    "fork_stuck": ensemble(calls("stuck", "X", "l"), calls("stuck2", "X", "r"), JOIN),
    "version": ensemble(calls("many", "X", "Y", version=1)),
    "nested": ensemble(step("ok", {"X": "X"}, {"Y": "m"}), calls("b", "m", "Y")),
    "fails": ensemble(calls("a", "X", "m"), calls("failing", "m", "Y")),
    "nested_fails": ensemble(step("fails", {"X": "X"}, {"Y": "m"}), calls("b", "m", "Y")),
    "opt_unmapped": ensemble(step("opt", {"A": "X"}, {"P": "Y"})),
    "opt_mapped": ensemble(step("opt", {"A": "X", "B": "W"}, {"P": "Y"}), inputs=("X", "W?")),
    "opt_needed": ensemble(step("ab", {"A": "X", "B": "W"}, {"P": "Y"}), inputs=("X", "W?")),
    "opt_unmade": ensemble(
        step("opt", {"A": "X"}, {"P": "p", "Q": "q"}), step("opt", {"A": "p", "B": "q"}, {"P": "Y"})
    ),
    "out_unmade": ensemble(step("opt", {"A": "X"}, {"P": "Y", "Q": "Z"}), outputs="YZ"),
    "needed_unmade": ensemble(step("opt", {"A": "X"}, {"P": "l", "Q": "r"}), JOIN),
    "dec_first": ensemble(calls("dec", "X", "m"), calls("b", "m", "Y")),
    "dec_last": ensemble(calls("a", "X", "m"), calls("dec", "m", "Y")),
    "dec_dec": ensemble(calls("dec", "X", "m"), calls("dec2", "m", "Y")),
    "dec_fails": ensemble(calls("dec", "X", "m"), calls("failing", "m", "Y")),
    "batch": ensemble(calls("bat4", "X", "m"), calls("bat8", "m", "Y"), more=BATCH_4),
    "batch_plain": ensemble(
        calls("bat4", "X", "m"), calls("a", "m", "k"), calls("bat4", "k", "Y"), more=BATCH_4
    ),
    "batch_lead": ensemble(calls("bat4", "X", "m"), calls("lead1", "m", "Y"), more=BATCH_4),
    "plain_batch": ensemble(calls("bat4", "X", "m"), calls("a", "m", "Y")),
    "any_batch": ensemble(calls("bat4", "X", "Y"), kind="INT32 -1, 2"),
    "any_three": ensemble(calls("any", "X", "m"), calls("three", "m", "Y"), kind="INT32 -1"),
    "cached": ensemble(calls("a", "X", "Y"), more=CACHED),
    "reshaped": ensemble(calls("a", "X", "Y"), kind="INT32 1, 2").replace(
        "dims: [1, 2]", "dims: [1, 2] reshape { shape: [2] }"
    ),
    "labelled": ensemble(calls("labels", "X", "m"), calls("labels", "m", "Y")),
    "of_cached": ensemble(calls("cachy", "X", "Y")),
    "says_not_decoupled": ensemble(
        calls("dec", "X", "Y"), more="model_transaction_policy { decoupled: false }"
    ),
    "says_decoupled": ensemble(calls("a", "X", "Y"), more=DECOUPLED),
}
WARM_UP = (
    'model_warmup { name: "w" batch_size: 1 inputs { key: "X" value { data_type: TYPE_INT32 '
    "dims: 2 zero_data: true } } }"
)
A = calls("a", "X", "Y")
UNREADABLE = {
    "x_nostep": (ensemble(), "must specify 'step' for ensemble 'x_nostep'"),
    "x_nomodel": (
        ensemble(calls("", "X", "Y")),
        "must specify 'model_name' in step 0 of ensemble 'x_nomodel'",
    ),
    "x_noin": (
        ensemble(step("a", {}, {"OUT": "Y"})),
        "must specify 'input_map' in step 0 of ensemble 'x_noin'",
    ),
    "x_noout": (
        ensemble(A, step("a", {"IN": "X"}, {})),
        "must specify 'output_map' in step 1 of ensemble 'x_noout'",
    ),
    "x_twice": (
        ensemble(A, calls("b", "X", "Y")),
        "ensemble tensor 'Y' can appear in an output map only once for ensemble 'x_twice' step 1",
    ),
    "x_same": (
        ensemble(step("ab", {"A": "X", "B": "X"}, {"P": "Y", "Q": "Y"})),
        "ensemble tensor 'Y' can appear in an output map only once for ensemble 'x_same' step 0",
    ),
    "x_group": (
        ensemble(A, more="instance_group { count: 1 kind: KIND_CPU }"),
        "instance group should not be specified for ensemble 'x_group'",
    ),
    "x_optimised": (
        ensemble(A, more="optimization { }"),
        "optimization should not be specified for ensemble 'x_optimised'",
    ),
    "x_warm": (
        ensemble(A, more=WARM_UP),
        "model_warmup can not be specified for ensemble 'x_warm'",
    ),
    "x_input": (
        ensemble(A, inputs="XW"),
        "ensemble input 'W' for ensemble x_input' is not used",
    ),
    "x_output": (
        ensemble(A, outputs="YZ"),
        "ensemble output 'Z' for ensemble x_output' is not used",
    ),
    "x_unwritten": (
        ensemble(calls("a", "m", "Y"), calls("b", "X", "k")),
        "output 'Y' for ensemble 'x_unwritten' is not written: at least one of its depending "
        "tensors, 'm', is not connected",
    ),
    "x_loop": (
        ensemble(
            step("ab", {"A": "X", "B": "k"}, {"P": "m"}), calls("b", "m", "k"), calls("b", "k", "Y")
        ),
        "output 'Y' for ensemble 'x_loop' is not written: at least one of its depending tensors, "
        "'m', is not connected",
    ),
    "x_unused": (
        ensemble(step("ab", {"A": "X", "B": "X"}, {"P": "Y", "Q": "k"})),
        "ensemble tensor 'k' is unused in ensemble 'x_unused'",
    ),
    "x_noio": (
        ensemble(A, inputs=(), outputs=()),
        "ensemble tensor 'X' is unused in ensemble 'x_noio'",
    ),
    "x_nooutputs": (
        ensemble(A, outputs=()),
        "ensemble tensor 'Y' is unused in ensemble 'x_nooutputs'",
    ),
    "x_backend": (
        ensemble(A, more='backend: "identity"'),
        "Ensemble model 'x_backend' must have platform type 'ensemble' and empty backend type",
    ),
    "x_back_in": (
        ensemble(calls("a", "X", "X"), outputs="X"),
        "ensemble tensor 'X' is an input of ensemble 'x_back_in' and must not appear in an output "
        "map, but does in that of step 0",
    ),
}
UNFIT = {
    "x_batch": (
        ensemble(calls("bat4", "X", "Y"), more=BATCH_8),
        "ensemble x_batch allows maximum batch size 8, but it contains model bat4 which only "
        "allows maximum batch size to be 4",
    ),
    "x_no_input": (
        ensemble(step("a", {"NOPE": "X"}, {"OUT": "Y"})),
        "in ensemble x_no_input, ensemble tensor X is mapping to non-existing input NOPE in model "
        "a",
    ),
    "x_unmapped": (
        ensemble(step("ab", {"A": "X"}, {"P": "Y"})),
        "in ensemble x_unmapped, input B in model ab is not mapped to any ensemble tensors",
    ),
    "x_no_output": (
        ensemble(step("a", {"IN": "X"}, {"NOPE": "Y"})),
        "in ensemble x_no_output, ensemble tensor Y is mapped from non-existing output NOPE in "
        "model a",
    ),
    "x_type": (
        ensemble(calls("a", "X", "m"), calls("fp", "m", "Y"), out="FP32 2"),
        "in ensemble x_type, ensemble tensor m: inconsistent data type: TYPE_INT32 is inferred "
        "from model a while TYPE_FP32 is inferred from model fp",
    ),
    "x_type_in": (
        ensemble(calls("fp", "X", "Y"), out="FP32 2"),
        "in ensemble x_type_in, ensemble tensor X: inconsistent data type: TYPE_INT32 is inferred "
        "from model x_type_in while TYPE_FP32 is inferred from model fp",
    ),
    "x_shape": (
        ensemble(calls("a", "X", "m"), calls("three", "m", "Y"), out="INT32 3"),
        "in ensemble x_shape, ensemble tensor m: inconsistent shape: [2] is inferred from model a "
        "while [3] is inferred from model three",
    ),
    "x_shape_in": (
        ensemble(calls("three", "X", "Y"), out="INT32 3"),
        "in ensemble x_shape_in, ensemble tensor X: inconsistent shape: [2] is inferred from model "
        "x_shape_in while [3] is inferred from model three",
    ),
    "x_version": (
        ensemble(calls("many", "X", "Y", version=2)),
        "ensemble 'x_version' depends on 'many' whose required version 2 is not loaded.",
    ),
    "x_version_0": (
        ensemble(calls("a", "X", "Y", version=0)),
        "ensemble 'x_version_0' depends on 'a' whose required version 0 is not loaded.",
    ),
    **{
        name: (
            config,
            f"in ensemble {name}, step of model '{name}' receives inputs originated from different "
            "decoupled models",
        )
        for name, config in {
            "x_join": ensemble(calls("dec", "X", "l"), calls("a", "X", "r"), JOIN),
            "x_mixed": ensemble(calls("dec", "X", "l"), calls("dec2", "X", "r"), JOIN),
            "x_one_of_two": ensemble(calls("dec", "X", "Y"), calls("b", "X", "Z"), outputs="YZ"),
            "x_two": ensemble(calls("dec", "X", "Y"), calls("dec2", "X", "Z"), outputs="YZ"),
        }.items()
    },
}
NO_WEIGHTS = (
    "ensemble 'x_badload' depends on 'badload' which has no loaded version. Model 'badload' "
    "loading failed with error: version 1 is at UNAVAILABLE state: Internal: no weights;"
)
UNLOADED = {
    "x_badload": (ensemble(calls("badload", "X", "Y")), NO_WEIGHTS),
    "x_badens": (
        ensemble(step("x_badload", {"X": "X"}, {"Y": "Y"})),
        "ensemble 'x_badens' depends on 'x_badload' which is not valid. Model 'x_badload' failed "
        f"with error: {NO_WEIGHTS}",
    ),
    "x_circle_1": (
        ensemble(step("x_circle_2", {"X": "X"}, {"Y": "Y"})),
        "circular dependency between ensembles: x_circle_1 -> ... -> x_circle_2 -> x_circle_1",
    ),
    "x_circle_2": (
        ensemble(step("x_circle_1", {"X": "X"}, {"Y": "Y"})),
        "circular dependency between ensembles: x_circle_2 -> ... -> x_circle_1 -> x_circle_2",
    ),
    "x_dec_cached": (
        ensemble(calls("dec", "X", "Y"), more=CACHED),
        "version 1 is at UNAVAILABLE state: Invalid argument: Response Cache does not currently "
        "support model x_dec_cached with 'decoupled' transaction policy. Please disable the "
        "response cache.;",
    ),
}


def write_ensembles(repository: Path) -> None:
    """Write them all."""
    for name, config in (MEMBERS | SERVED).items():
        write_model(repository, name, config)
    (repository / "labels" / "labels.txt").write_text("zero\none\n")
    write_model(repository, "many", leaf(more="version_policy { all { } }"), versions=(1, 3))
    for name, (config, _) in (UNREADABLE | UNFIT | UNLOADED).items():
        write_model(repository, name, config)
