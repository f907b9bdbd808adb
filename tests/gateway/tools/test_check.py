"""`sluice check` has a verdict and a place for every field."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from gateway.errors import InferenceError
from gateway.models.repository import ModelRepository
from gateway.models.supported_fields import FieldVerdict
from gateway.tools.check import FieldFinding, check, table
from tests.builders import add_model

DATA = Path(__file__).parent.parent / "config" / "data"
HONOURED, IGNORED, REFUSED = FieldVerdict.HONOURED, FieldVerdict.IGNORED, FieldVerdict.REFUSED

CONFIG = """\
backend: "python"  # a comment
max_batch_size: 4
input [
  {
    name: "i" data_type: TYPE_FP32
    dims: [ 3 ]
    is_shape_tensor: false
  }
]
dynamic_batching { preferred_batch_size: [ 2, 4 ] }
parameters { key: "k" value { string_value: "v" } }
cc_model_filenames { key: "7.5" value: "model.plan" }
"""


def findings_of(repository: Path, config: str) -> list[FieldFinding]:
    add_model(repository, "m", config)
    return check(ModelRepository([repository]))


def brief(findings: list[FieldFinding]) -> list[tuple[int, str, FieldVerdict]]:
    return [(each.line, each.field, each.verdict) for each in findings]


def test_every_field_has_a_verdict_and_a_line(tmp_path: Path) -> None:
    findings = findings_of(tmp_path, CONFIG)
    assert brief(findings) == [
        (1, "backend", HONOURED),
        (2, "max_batch_size", HONOURED),
        (5, "input.name", HONOURED),
        (5, "input.data_type", HONOURED),
        (6, "input.dims", HONOURED),
        (7, "input.is_shape_tensor", HONOURED),
        (10, "dynamic_batching", HONOURED),
        (11, "parameters.k", HONOURED),
        (12, "cc_model_filenames", IGNORED),
    ]
    assert {(each.model, each.path) for each in findings} == {("m", "m/config.pbtxt")}
    assert findings[-1].why == "the default model file is used on every device"


@pytest.mark.parametrize("named", ['backend: "tensorrt"', 'platform: "tensorrt_plan"'])
def test_what_only_one_backend_honours_is_honoured_for_its_models(
    tmp_path: Path, named: str
) -> None:
    text = f"{named}\noptimization {{ cuda {{ graphs: true }} }}"
    assert (2, "optimization.cuda", HONOURED) in brief(findings_of(tmp_path, text))


def test_each_parameter_is_a_finding(tmp_path: Path) -> None:
    path = "TRITON_BATCH_STRATEGY_PATH"
    text = f"""\
backend: "x" # {path}
parameters {{ key: "other" value {{ string_value: "v" }} }}
parameters {{
  key: "{path}" value {{ string_value: "/batch.so" }}
}}
"""
    findings = findings_of(tmp_path, text)
    assert brief(findings) == [
        (1, "backend", HONOURED),
        (2, "parameters.other", HONOURED),
        (4, f"parameters.{path}", IGNORED),
    ]
    assert findings[-1].why == "no library decides which requests share a batch"


def test_parameters_for_the_steps_of_a_roll_have_their_lines_and_the_fix(tmp_path: Path) -> None:
    text = 'backend: "x"' + parameters(replicas="1..8", roll_steps="10,50,100", roll_step_secs="60")
    findings = findings_of(tmp_path, text)
    assert brief(findings)[1:] == [
        (2, "parameters.replicas", HONOURED),
        (3, "parameters.roll_steps", IGNORED),
        (4, "parameters.roll_step_secs", IGNORED),
    ]
    for each in findings[2:]:
        assert each.why.startswith("there is no such parameter: ")
        assert "the model's rollout.json" in each.why


def parameters(**given: str) -> str:
    return "".join(
        f'\nparameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in given.items()
    )


@pytest.mark.parametrize(
    ("named", "given"),
    [
        (
            'backend: "fil"',
            {
                "threshold": (HONOURED, "0.5"),
                "algo": (IGNORED, "ALGO_AUTO"),
                "layout": (IGNORED, "x"),
                "predict_proba": (REFUSED, "True"),
                "model_type": (REFUSED, "catboost"),
                "max_in_flight": (HONOURED, "8"),
            },
        ),
        (
            'backend: "openvino"',
            {
                "num_streams": (HONOURED, "auto"),
                "ENABLE_BATCH_PADDING": (IGNORED, "YES"),
                "HINT_BF16": (REFUSED, "NO"),
                "NUM_STREAM": (IGNORED, "2"),
            },
        ),
        (
            'platform: "tensorflow_savedmodel"',
            {
                "TF_GRAPH_TAG": (HONOURED, "serve"),
                "TF_NUM_INTRA_THREADS": (REFUSED, "-1"),
                "TF_USE_PER_SESSION_THREADS": (IGNORED, "yes"),
            },
        ),
        ('backend: "python"', {"anything": (HONOURED, "x"), "num_streams": (HONOURED, "x")}),
    ],
)
def test_parameters_have_the_verdict_of_their_backend(
    tmp_path: Path, named: str, given: dict[str, tuple[FieldVerdict, str]]
) -> None:
    text = named + parameters(**{key: value for key, (_, value) in given.items()})
    findings = brief(findings_of(tmp_path, text))
    assert findings[1:] == [
        (line, f"parameters.{key}", verdict)
        for line, (key, (verdict, _)) in enumerate(given.items(), 2)
    ]


def test_a_parameter_is_found_however_it_is_spelled(tmp_path: Path) -> None:
    text = """\
backend: "x" # k
parameters: [ { value: { string_value: "k" } key: 'a' },
  { key: "\\153" value { string_value: "k" } } ]
"""
    findings = findings_of(tmp_path, text)
    assert sorted(brief(findings)) == [
        (0, "parameters.k", HONOURED),
        (1, "backend", HONOURED),
        (2, "parameters.a", HONOURED),
    ]


ACCELERATED = "optimization { execution_accelerators { %s_execution_accelerator { name: 'x' } } }"


@pytest.mark.parametrize(
    ("named", "side", "verdict"),
    [
        ('platform: "tensorflow_savedmodel"', "cpu", REFUSED),
        ('backend: "tensorflow"', "cpu", REFUSED),
        ('platform: "tensorflow_graphdef"', "gpu", IGNORED),
        ('backend: "openvino"', "cpu", IGNORED),
        ('backend: "onnxruntime"', "cpu", HONOURED),
    ],
)
def test_accelerators_have_the_verdict_of_their_backend(
    tmp_path: Path, named: str, side: str, verdict: FieldVerdict
) -> None:
    findings = findings_of(tmp_path, f"{named}\n{ACCELERATED % side}")
    path = f"optimization.execution_accelerators.{side}_execution_accelerator"
    assert brief(findings)[1:] == [(2, path, verdict)]
    if verdict is REFUSED:
        assert findings[1].why == "CPU Execution Accelerator is not supported in TensorFlow backend"


def test_a_refused_field_that_is_set_to_its_default_does_no_harm(tmp_path: Path) -> None:
    flag = "is_non_linear_format_io"
    text = f'backend: "x"\ninput [ {{ {flag}: false }},\n {{ {flag}: true }} ]'
    assert brief(findings_of(tmp_path, text)) == [
        (1, "backend", HONOURED),
        (2, f"input.{flag}", HONOURED),
        (3, f"input.{flag}", REFUSED),
    ]


def test_every_unknown_field_is_refused_where_it_is(tmp_path: Path) -> None:
    text = 'backend: "x"\nmax_batchsize: 3\noptimization { cuda { foo { bar: 1 } } }'
    findings = findings_of(tmp_path, text)
    assert brief(findings) == [
        (1, "backend", HONOURED),
        (2, "max_batchsize", REFUSED),
        (3, "optimization.cuda", IGNORED),
        (3, "optimization.cuda.foo", REFUSED),
    ]
    assert findings[1].why == "there is no such field; did you mean 'max_batch_size'?"


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ('backend: "x"\nmax_batch_size: "3"', 2, 'found "3", expected an integer'),
        (
            'backend: "x"\n\nmax-size: 1',
            3,
            "found unknown field 'max-size', expected a field of ModelConfig, such as "
            "'max_batch_size'",
        ),
        (
            'backend: "x" max_batch_size: -1',
            0,
            "'max_batch_size' must be non-negative value for m",
        ),
        (
            'backend: "x" version_policy { specific { versions: 7 } }',
            0,
            "at least one version must be available under the version policy of model 'm'",
        ),
        (
            'backend: "x" instance_group { kind: 9 }',
            0,
            "m/config.pbtxt: found kind 9, expected one of KIND_AUTO, KIND_GPU, KIND_CPU, "
            "KIND_MODEL",
        ),
    ],
)
def test_what_is_wrong_beyond_fields_is_the_last_finding(
    tmp_path: Path, text: str, line: int, why: str
) -> None:
    *fields, last = findings_of(tmp_path, text)
    assert last == FieldFinding(
        model="m", path="m/config.pbtxt", line=line, verdict=REFUSED, why=why
    )
    assert all(each.verdict is HONOURED for each in fields)


@pytest.mark.parametrize("text", [None, "", "# nothing"])
def test_a_model_without_fields_is_not_passed_over(tmp_path: Path, text: str | None) -> None:
    add_model(tmp_path, "m.python", text)
    assert check(ModelRepository([tmp_path])) == [
        FieldFinding(
            model="m.python",
            path="m.python/config.pbtxt",
            verdict=HONOURED,
            why="no fields: all is left to the files of the model and to its backend",
        )
    ]


def test_a_model_in_two_repositories_is_refused(tmp_path: Path) -> None:
    homes = [tmp_path / "one", tmp_path / "two"]
    for home in homes:
        add_model(home, "m", CONFIG)
    assert check(ModelRepository(homes)) == [
        FieldFinding(
            model="m", path="m", verdict=REFUSED, why="model appears in two or more repositories"
        )
    ]


# Those of an ensemble also depend on its members: see test_ensemble_members_checks.py.
@pytest.mark.parametrize(
    "name", sorted({path.stem for path in DATA.glob("*.pbtxt")} - {"ensemble"})
)
def test_a_model_has_a_refusal_exactly_if_the_server_refuses_it(tmp_path: Path, name: str) -> None:
    add_model(tmp_path, name, (DATA / f"{name}.pbtxt").read_text())
    (tmp_path / name / "1" / "model.py").write_text("")
    repository = ModelRepository([tmp_path])
    try:
        repository.read(name)
        served = True
    except InferenceError:
        served = False
    assert served is all(each.verdict is not REFUSED for each in check(repository))


def test_models_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        add_model(tmp_path, name, 'backend: "x"')
    assert [each.model for each in check(ModelRepository([tmp_path]))] == ["a", "b"]


def test_the_table_shows_where_what_and_why_without_interpreting_it() -> None:
    finding = FieldFinding(
        model="m", path="m/config.pbtxt", line=3, field="[bold]x", verdict=REFUSED, why="[red]no"
    )
    shown = io.StringIO()
    other = FieldFinding(model="m", path="n", verdict=IGNORED, why="why")
    Console(width=100, file=shown).print(table([finding, other]))
    for text in ("m/config.pbtxt:3", "[bold]x", "refused", "[red]no", "│ n ", "ignored", "why"):
        assert text in shown.getvalue()


def test_a_narrow_table_has_long_names_in_full() -> None:
    name = "parameters.memory_enable_memory_arena_shrinkage"
    shown = io.StringIO()
    finding = FieldFinding(model="m", path="n", field=name, verdict=IGNORED, why="why " * 20)
    Console(width=60, file=shown).print(table([finding]))
    cells = [row.split("│")[2].strip() for row in shown.getvalue().splitlines() if "│" in row]
    assert "".join(cells) == name


def test_a_wrong_parameter_of_replicas_is_refused_with_its_line(tmp_path: Path) -> None:
    text = """backend: "python"
parameters { key: "replica_labels" value { string_value: '{"zone": "a"}' } }
parameters { key: "replicas" value { string_value: "8..1" } }
"""
    findings = findings_of(tmp_path, text)
    assert brief(findings)[1:] == [
        (2, "parameters.replica_labels", HONOURED),
        (3, "parameters.replicas", REFUSED),
    ]
    assert findings[-1].why == (
        "model 'm': parameter 'replicas' is '8..1', expected a number from 1 to 9999, or a range "
        "such as 0..8"
    )


def test_resources_that_do_not_fit_the_engine_are_refused_by_their_value(tmp_path: Path) -> None:
    bundles = '[{"GPU": 1}, {"GPU": 1}]'
    text = f"""backend: "vllm"
parameters {{ key: "replica_resources" value {{ string_value: '{bundles}' }} }}
"""
    version = add_model(tmp_path, "m", text) / "1"
    engine = '{"tensor_parallel_size": 3, "distributed_executor_backend": "ray"}'
    (version / "model.json").write_text(engine)
    (*_, found) = check(ModelRepository([tmp_path]))
    assert (found.path, found.verdict) == ("m/config.pbtxt", REFUSED)
    assert found.why == (
        f"model 'm': parameter 'replica_resources' is '{bundles}', expected a list of 3 bundles "
        "with one GPU each, for the Ray workers of its model.json"
    )
