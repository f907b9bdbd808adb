"""The command: every failure is one clear line on stderr, without a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from gateway import __version__
from gateway.cli import main

GOOD = 'backend: "identity"\nmax_batch_size: 2\n'


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def repository(folder: Path, config: str) -> Path:
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "config.pbtxt").write_text(config)
    return folder


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"sluice {__version__}\n"


def test_the_command_imports_no_library_before_it_needs_one() -> None:
    """Engine processes import the command again."""
    libraries = {"fastapi", "httpx", "numpy", "pydantic", "rich", "uvicorn", "uvloop"}
    program = f"import gateway.cli, sys; print(sorted({libraries} & set(sys.modules)))"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"[]\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "COMMAND"),
        (("dance",), "dance"),
        (("serve",), "--model-repository"),
        (("serve", "--model-repository=x", "--nope"), "--nope"),
        (("tritonserver", "--model-repo=x"), "--model-repository"),
        (("tritonserver", "--model-store=x", "stray"), "Unexpected argument: stray"),
        (("serve", "--model-repository=x", "--http-port=x"), "'x' is no port"),
        (("check", "no-such-folder"), "no-such-folder"),
        (("doctor", "--limit-secs=0"), "'0' is no duration"),
        (("fetch", "no-such-model"), "smollm2-135m-instruct"),
    ],
)
def test_a_mistake_ends_with_status_1_and_names_itself(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


def test_check_shows_every_field_and_passes_what_is_honoured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["check", str(repository(tmp_path, GOOD))])
    shown = capsys.readouterr().out
    assert "m/config.pbtxt:2" in shown
    assert "max_batch_size" in shown


@pytest.mark.parametrize(
    "wrong",
    [
        'output { name: "y" data_type: TYPE_INT64 dims: [ 1 ] is_non_linear_format_io: true }',
        'parameters { key: "max_in_flight" value { string_value: "many" } }',
    ],
)
def test_check_fails_where_a_field_is_refused(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", str(repository(tmp_path, f"{GOOD}{wrong}\n"))) == 1
    assert "refused" in capsys.readouterr().out


def onnx_like(folder: Path) -> Path:
    """A repository whose file is no model at all."""
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "1" / "model.pt").write_text("junk")
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("m",), "'m' is no file; for a model of a repository add --model-repository DIR"),
        (("m", "--model-repository=nowhere"), "nowhere"),
        (("x", "--model-repository={}"), "model 'x' is not in any repository; found: m"),
        (("{}/m/1/nothing.onnx",), "'nothing.onnx' does not exist"),
        (("m", "--model-repository={}"), "'model.pt' is no archive of PyTorch"),
        (("{}/m/1/model.pt", "--write"), "'model.pt' is no archive of PyTorch"),
    ],
)
def test_config_says_in_one_line_why_it_drafts_nothing(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = onnx_like(tmp_path)
    assert run("config", *(each.format(folder) for each in arguments)) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert not (folder / "m" / "config.pbtxt").exists()


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A repository with a model whose file tells all."""
    from tests.torch_models import export_add_sub  # takes two seconds

    (tmp_path / "m" / "1").mkdir(parents=True)
    export_add_sub(tmp_path / "m" / "1" / "model.pt2")
    return tmp_path


def test_config_prints_a_configuration_that_passes_the_check(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["config", "m", f"--model-repository={exported}"])
    shown = capsys.readouterr()
    assert shown.err == ""
    (exported / "m" / "config.pbtxt").write_text(shown.out)
    main(["check", str(exported)])
    assert "refused" not in capsys.readouterr().out


def test_the_folder_of_one_model_is_checked_and_configured_under_the_name_of_the_variable(
    exported: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_NAME", "served")
    main(["config", "served", f"--model-repository={exported / 'm'}", "--write"])
    assert (exported / "m" / "config.pbtxt").exists()
    main(["check", str(exported / "m")])
    assert "served/config.pbtxt" in capsys.readouterr().out


def test_config_of_a_model_file_needs_no_folder_for_caches(
    exported: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLUICE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    main(["config", str(exported / "m" / "1" / "model.pt2")])
    assert 'backend: "pytorch"' in capsys.readouterr().out


def test_config_never_overwrites_unless_forced(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(exported / "m" / "1" / "model.pt2")
    written = exported / "m" / "config.pbtxt"
    main(["config", file, "--write"])
    assert "max_batch_size: 4" in written.read_text()
    written.write_text("mine")
    assert run("config", file, "--write") == 1
    assert "--force overwrites it" in capsys.readouterr().err
    assert written.read_text() == "mine"
    main(["config", file, "--write", "--force"])
    assert "max_batch_size: 4" in written.read_text()


def test_config_does_not_write_outside_a_repository(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loose = (exported / "m" / "1" / "model.pt2").rename(exported / "loose.pt2")
    assert run("config", str(loose), "--write") == 1
    assert "--write needs a model of a repository" in capsys.readouterr().err
    assert list(exported.glob("*.pbtxt")) == []
