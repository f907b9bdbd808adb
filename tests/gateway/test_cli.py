"""The command: every failure is one clear line on stderr, without a traceback."""

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "COMMAND"),
        (("dance",), "dance"),
        (("serve",), "--model-repository"),
        (("serve", "--model-repository=x", "--nope"), "--nope"),
        (("serve", "--model-repository=x", "--http-port=x"), "'x' is no port"),
        (("check", "no-such-folder"), "no-such-folder"),
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
        "sequence_batching { }",
        'parameters { key: "max_in_flight" value { string_value: "many" } }',
    ],
)
def test_check_fails_where_a_field_is_refused(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", str(repository(tmp_path, f"{GOOD}{wrong}\n"))) == 1
    assert "refused" in capsys.readouterr().out
