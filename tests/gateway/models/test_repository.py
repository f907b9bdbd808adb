"""The repository is read as by Triton; no error names a folder above it."""

import json
import logging
import os
import tempfile
from pathlib import Path

import pytest

from gateway.config import AllVersions, SpecificVersions, VersionPolicy
from gateway.config.pbtxt import to_json
from gateway.errors import Code, InferenceError
from gateway.models.instance_groups import UsableGpus
from gateway.models.model_folder import Override
from gateway.models.repository import ModelId, ModelRepository
from gateway.rollouts.plan import read_plan
from tests.builders import add_model

DATA = Path(__file__).parent.parent / "config" / "data"
BACKEND = 'backend: "python"'


def refusal(repository: Path, name: str) -> InferenceError:
    """The reason why a model cannot be read; the message must not name the place of the model."""
    with pytest.raises(InferenceError) as caught:
        ModelRepository([repository]).read(name)
    assert str(repository.parent) not in caught.value.message
    return caught.value


def test_every_folder_of_every_repository_is_a_model(tmp_path: Path) -> None:
    for home, name in (("one", "b"), ("two", "a"), ("one", "c.d")):
        add_model(tmp_path / home, name)
    (tmp_path / "one" / "README.md").write_text("no model")
    repository = ModelRepository([tmp_path / "one", tmp_path / "two"])
    assert repository.names() == ("a", "b", "c.d")
    assert repository.find("b").path == tmp_path / "one" / "b"
    assert repository.find("a").path == tmp_path / "two" / "a"


@pytest.mark.parametrize("name", ["absent", "file", "", ".", "..", "../other/x", "m/1", "a\0b"])
def test_what_is_no_folder_of_the_repository_is_not_found(tmp_path: Path, name: str) -> None:
    add_model(tmp_path / "other", "x")
    add_model(tmp_path / "home", "m")
    (tmp_path / "home" / "file").write_text("")
    with pytest.raises(InferenceError) as caught:
        ModelRepository([tmp_path / "home"]).find(name)
    assert caught.value.code is Code.NOT_FOUND
    assert caught.value.message == f"model '{name}' is not in any repository"


def test_a_model_in_two_repositories_is_served_from_neither(tmp_path: Path) -> None:
    homes = [tmp_path / "one", tmp_path / "two"]
    for home in homes:
        add_model(home, "m")
    repository = ModelRepository(homes)
    assert repository.names() == ("m",)
    with pytest.raises(InferenceError) as caught:
        repository.read("m")
    assert caught.value.message == "model appears in two or more repositories"


def test_a_repository_given_twice_is_one(tmp_path: Path) -> None:
    add_model(tmp_path, "m")
    assert ModelRepository([tmp_path, tmp_path]).find("m").available == (1,)


def test_folders_named_by_integers_are_versions(tmp_path: Path) -> None:
    folders = ("10", "9", "0", "007", "abc", "1a", "warmup", "initial_state", "configs")
    (add_model(tmp_path, "m", versions=folders) / "4").write_text("a file")
    entry = ModelRepository([tmp_path]).find("m")
    assert entry.available == (0, 9, 10)
    assert entry.ignored == ("007", "1a", "abc")


def test_a_policy_picks_from_the_versions_there_are(tmp_path: Path) -> None:
    add_model(tmp_path, "m", versions=("1", "2", "10"))
    entry = ModelRepository([tmp_path]).find("m")
    assert entry.versions(None) == (10,)
    assert entry.versions(VersionPolicy(all=AllVersions())) == (1, 2, 10)


def test_a_policy_that_picks_no_version_is_an_error(tmp_path: Path) -> None:
    add_model(tmp_path, "m")
    entry = ModelRepository([tmp_path]).find("m")
    with pytest.raises(InferenceError) as caught:
        entry.versions(VersionPolicy(specific=SpecificVersions(versions=(2,))))
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == (
        "at least one version must be available under the version policy of model 'm'"
    )


def test_folders_without_version_and_versions_without_folder_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = BACKEND + " version_policy { specific { versions: [ 1, 7 ] } }"
    add_model(tmp_path, "m", text, versions=("1", "abc", "warmup"))
    with caplog.at_level(logging.WARNING, "sluice.repository"):
        ModelRepository([tmp_path]).read("m")
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("WARNING", "folder is no version"),
        ("ERROR", "version missing"),
    ]
    assert vars(caplog.records[0])["folder"] == "abc"
    assert vars(caplog.records[1])["version"] == 7


def test_a_folder_whose_name_is_no_text_is_no_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_model(tmp_path, "m", BACKEND)
    (tmp_path / os.fsdecode(b"bad\xff") / "1").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "sluice.repository"):
        repository = ModelRepository([tmp_path])
    assert repository.names() == ("m",)
    assert [each.name for each in repository.ids()] == ["m"]
    assert [each.getMessage() for each in caplog.records] == ["folder is no model: not UTF-8"]
    assert vars(caplog.records[0])["folder"] == r"'bad\udcff'"


def test_fields_and_parameters_that_do_nothing_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = "TRITON_BATCH_STRATEGY_PATH"
    parameter = f'parameters {{ key: "{key}" value {{ string_value: "/batch.so" }} }}'
    add_model(tmp_path, "m", f'{BACKEND} {parameter} cc_model_filenames {{ key: "7" value: "m" }}')
    with caplog.at_level(logging.WARNING, "sluice.repository"):
        ModelRepository([tmp_path]).read("m")
    assert [each.getMessage() for each in caplog.records] == ["field ignored"] * 2
    assert [vars(each)["field"] for each in caplog.records] == [
        "cc_model_filenames",
        f"parameters.{key}",
    ]
    assert vars(caplog.records[1])["why"] == "no library decides which requests share a batch"


STEPS = """\
# parameters { key: "roll_steps" }
parameters { key: "other" value { string_value: "roll_steps" } }
parameters {
  key:
    'roll_steps'
  value { string_value: "10,50,100" }
}
parameters { key: "roll_step_secs" value { string_value: "60" } }
"""


def test_parameters_for_the_steps_of_a_roll_are_logged_with_their_lines_and_the_fix(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_model(tmp_path, "m", f"{BACKEND}\n{STEPS}")
    with caplog.at_level(logging.WARNING, "sluice.repository"):
        ModelRepository([tmp_path]).read("m")
    logged = {each["field"]: each for each in map(vars, caplog.records)}
    steps, secs = logged["parameters.roll_steps"], logged["parameters.roll_step_secs"]
    assert (len(logged), steps["line"], secs["line"]) == (2, 6, 9)
    plan = read_plan(steps["why"].partition("rollout.json, such as ")[2])
    assert [each.weight for each in plan.steps] == [10, 50, 100]
    step = secs["why"].partition("its time, such as ")[2]
    last = '{"weight": 100}'
    assert read_plan(f'{{"steps": [{step}, {last}]}}').steps[0].lasts == "60s"


@pytest.mark.parametrize("text", [None, "", "# nothing\n"])
def test_a_model_without_config_is_known_by_its_files(tmp_path: Path, text: str | None) -> None:
    (add_model(tmp_path, "absent", text) / "1" / "model.py").write_text("")
    config = ModelRepository([tmp_path]).read("absent")
    assert to_json(config) == json.loads((DATA / "absent.json").read_text())


def test_the_lowest_version_identifies_the_backend(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "m", config=None, versions=("2", "10"))
    (folder / "2" / "model.onnx").mkdir()
    (folder / "10" / "model.py").write_text("")
    assert ModelRepository([tmp_path]).read("m").backend == "onnxruntime"


def test_a_config_of_the_preferred_name_wins_where_there_is_one(tmp_path: Path) -> None:
    custom = add_model(tmp_path, "m") / "configs" / "fast.pbtxt"
    custom.parent.mkdir()
    custom.write_text('backend: "identity"')
    add_model(tmp_path, "n")
    assert ModelRepository([tmp_path]).read("m").backend == "python"
    repository = ModelRepository([tmp_path], "fast")
    assert repository.read("m").backend == "identity"
    assert repository.config_file("m").source == "m/configs/fast.pbtxt"
    assert repository.read("n").backend == "python"
    assert repository.config_file("n").source == "n/config.pbtxt"


def test_the_gpus_of_the_machine_decide_the_devices_of_instances(tmp_path: Path) -> None:
    add_model(tmp_path, "m", BACKEND + " instance_group { kind: KIND_AUTO }")
    assert ModelRepository([tmp_path]).read("m").instance_group[0].kind == "KIND_CPU"
    [group] = ModelRepository([tmp_path], gpus=UsableGpus((0, 1))).read("m").instance_group
    assert (group.kind, group.gpus) == ("KIND_GPU", (0, 1))


def test_nothing_is_remembered_between_two_reads(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "m")
    repository = ModelRepository([tmp_path])
    assert repository.read("m").max_batch_size == 0
    (folder / "config.pbtxt").write_text(BACKEND + " max_batch_size: 3")
    (folder / "2").mkdir()
    assert repository.read("m").max_batch_size == 3
    assert repository.find("m").available == (1, 2)


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (
            "\n foo: 1",
            Code.INVALID_ARG,
            "m/config.pbtxt, line 2, column 2: found unknown field 'foo', expected a field of "
            "ModelConfig",
        ),
        (
            "backend: 'x' max_batch_size: -1",
            Code.INVALID_ARG,
            "'max_batch_size' must be non-negative value for m",
        ),
        (
            "backend: 'x' input { name: 'a' is_non_linear_format_io: true }",
            Code.UNSUPPORTED,
            "field 'input.is_non_linear_format_io' of model 'm' is not supported: tensors in "
            "vectorised formats are not served",
        ),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    tmp_path: Path, text: str, code: Code, message: str
) -> None:
    add_model(tmp_path, "m", text)
    error = refusal(tmp_path, "m")
    assert (error.code, error.message) == (code, message)


def test_a_config_that_cannot_be_read_is_not_taken_for_an_absent_one(tmp_path: Path) -> None:
    (add_model(tmp_path, "m", config=None) / "config.pbtxt").mkdir()
    error = refusal(tmp_path, "m")
    assert error.code is Code.INTERNAL
    assert error.message == "'m/config.pbtxt' cannot be read: Is a directory"


def test_a_config_has_a_limited_size(tmp_path: Path) -> None:
    file = add_model(tmp_path, "m", config="") / "config.pbtxt"
    os.truncate(file, 1 << 40)
    error = refusal(tmp_path, "m")
    assert (error.code, error.message) == (
        Code.INVALID_ARG,
        f"'m/config.pbtxt' has a configuration of {1 << 40} bytes, expected at most 16777216",
    )
    with pytest.raises(InferenceError, match="'config' has a configuration of 16777217 bytes"):
        ModelRepository([tmp_path]).overridden(ModelId("m"), Override("{" + " " * (1 << 24)))


def make_absent(path: Path) -> None:
    del path


def make_file(path: Path) -> None:
    path.write_text("")


def make_loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("make", "code", "message"),
    [
        (make_absent, Code.NOT_FOUND, "folder 'models' does not exist"),
        (make_file, Code.INVALID_ARG, "found that 'models' is a file, expected a folder"),
        (
            make_loop,
            Code.INTERNAL,
            "'models' cannot be read: Too many levels of symbolic links",
        ),
    ],
)
def test_a_repository_that_cannot_be_listed_is_an_error_at_once(
    tmp_path: Path, make: object, code: Code, message: str
) -> None:
    path = tmp_path / "models"
    make(path)  # type: ignore[operator]
    with pytest.raises(InferenceError) as caught:
        ModelRepository([path])
    assert (caught.value.code, caught.value.message) == (code, message)


INCOMPLETE = "backend: 'x' input { name: 'i' }"


def test_inputs_may_be_missing_unless_auto_completion_is_off(tmp_path: Path) -> None:
    add_model(tmp_path, "m", INCOMPLETE)
    assert ModelRepository([tmp_path]).read("m").input[0].name == "i"
    with pytest.raises(InferenceError) as caught:
        ModelRepository([tmp_path], auto_complete=False).read("m")
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == "model input 'i' must specify 'data_type' for m"


@pytest.mark.parametrize("config", [None, ""])
def test_a_config_that_must_be_whole_must_be_there(tmp_path: Path, config: str | None) -> None:
    add_model(tmp_path, "m", config)
    with pytest.raises(InferenceError) as caught:
        ModelRepository([tmp_path], auto_complete=False).read("m")
    assert caught.value.code is Code.INTERNAL
    assert caught.value.message.startswith("failed to open text file for read m/config.pbtxt: ")


def test_a_model_in_two_repositories_is_one_that_cannot_be_found(tmp_path: Path) -> None:
    homes = [tmp_path / "one", tmp_path / "two"]
    for home in homes:
        add_model(home, "m", "backend: 'x'")
    repository = ModelRepository(homes)
    assert repository.ids() == (ModelId("m"),) == repository.named("m")
    with pytest.raises(InferenceError, match="appears in two or more repositories"):
        repository.find("m")


def test_with_namespaces_each_repository_has_models_of_its_own(tmp_path: Path) -> None:
    homes = [tmp_path / "one", tmp_path / "two"]
    for home in homes:
        add_model(home, "m", "backend: 'x'")
    repository = ModelRepository(homes, namespacing=True)
    ids = tuple(ModelId("m", str(home)) for home in homes)
    assert repository.ids() == ids == repository.named("m")
    assert [repository.source(each).folder for each in ids] == [home / "m" for home in homes]


def test_the_state_of_a_folder_changes_with_a_second_one_of_its_name(tmp_path: Path) -> None:
    homes = [tmp_path / "one", tmp_path / "two"]
    add_model(homes[0], "m", "backend: 'x'")
    homes[1].mkdir()
    repository = ModelRepository(homes)
    before = repository.snapshots()
    add_model(homes[1], "m", "backend: 'x'")
    assert repository.snapshots().keys() == before.keys()
    assert repository.snapshots() != before


def test_a_clients_config_takes_the_place_of_the_file(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "m", "nonsense")
    override = Override('{"backend": "x", "max_batch_size": 3}')
    source = ModelRepository([tmp_path]).overridden(ModelId("m"), override)
    assert (source.config.name, source.config.max_batch_size) == ("m", 3)
    assert (source.folder, source.upload, source.overridden) == (folder, None, True)


@pytest.mark.parametrize(
    "config",
    [
        '{"backend": "x", "default_model_filename": "../../secret"}',
        '{"backend": "x", "default_model_filename": "/etc/passwd"}',
        '{"backend": "x", "cc_model_filenames": {"8.6": "a/../../b"}}',
    ],
)
def test_a_clients_config_cannot_point_outside_the_model(tmp_path: Path, config: str) -> None:
    add_model(tmp_path, "m", "backend: 'x'")
    with pytest.raises(InferenceError, match="must stay within the version's folder"):
        ModelRepository([tmp_path]).overridden(ModelId("m"), Override(config))


def test_uploaded_files_are_all_there_is(tmp_path: Path) -> None:
    files = {"file:7/model.x": b"weights", "file:labels.txt": b"a\n"}
    source = ModelRepository([tmp_path]).overridden(
        ModelId("new"), Override('{"backend": "x"}', files)
    )
    assert source.entry.available == (7,)
    assert (source.folder / "7" / "model.x").read_bytes() == b"weights"
    assert source.folder.stat().st_mode & 0o077 == 0
    assert source.upload is not None
    source.upload.release()
    assert not source.folder.exists()


def test_uploaded_files_are_deleted_when_their_config_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    override = Override('{"backend": "x", "max_batch_size": -1}', {"file:1/x": b""})
    (tmp_path / "models").mkdir()
    with pytest.raises(InferenceError, match="non-negative"):
        ModelRepository([tmp_path / "models"]).overridden(ModelId("new"), override)
    assert [each.name for each in tmp_path.iterdir()] == ["models"]
