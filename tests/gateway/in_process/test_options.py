"""The keywords of a server are the options of the command line."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from gateway.cache_settings import LocalCacheSettings
from gateway.errors import Code, InferenceError
from gateway.flags import serve
from gateway.in_process.options import SWITCHES, read_settings
from gateway.settings import ControlMode


def test_options_have_the_names_of_the_command_line_and_python_values(tmp_path: Path) -> None:
    settings = read_settings(
        {
            "model_repository": [tmp_path, "other"],
            "model_control_mode": "explicit",
            "load_model": ["a", "b"],
            "strict_readiness": False,
            "disable_auto_complete_config": True,
            "backend_config": {"onnxruntime": {"a": 1}, "every": True},
            "cache_config": {"local": {"size": 4096}},
            "metrics_config": {"summary_latencies": True},
            "exit_timeout_secs": 2.5,
            "id": None,
        }
    )
    assert settings.models.repositories == (tmp_path, Path("other"))
    assert settings.models.control_mode is ControlMode.EXPLICIT
    assert settings.models.startup == ("a", "b")
    assert not settings.models.strict_readiness
    assert not settings.models.auto_complete
    assert settings.models.backends == {"onnxruntime": {"a": "1"}, "": {"every": "true"}}
    assert settings.cache == LocalCacheSettings(byte_size=4096)
    assert settings.metrics.summary_latencies
    assert settings.exit_timeout_secs == 2.5
    assert settings.id == "triton"


def test_no_port_listens_by_default() -> None:
    quiet = read_settings({"model_repository": "m", "disable_auto_complete_config": False})
    assert [quiet.http.enabled, quiet.grpc.enabled, quiet.metrics.enabled] == [False] * 3
    assert quiet.models.auto_complete
    asked = read_settings({"model_repository": "m", "http_port": 0, "allow_grpc": True})
    assert (asked.http.enabled, asked.grpc.enabled, asked.metrics.enabled) == (True, True, False)
    shut = read_settings({"model_repository": "m", "http_port": 0, "allow_http": False})
    assert not shut.http.enabled


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "model_repository is missing"),
        ({"model_repository": []}, "model_repository is missing"),
        ({"model_repository": "m", "modle": 1}, "unrecognized arguments: --modle=1"),
        ({"model_repository": "m", "model_repo": "n"}, "unrecognized arguments: --model-repo=n"),
        ({"model_repository": "m", "model_control_mode": "x"}, "invalid choice: 'x'"),
        ({"model_repository": "m", "load_model": "a"}, "--model-control-mode=explicit"),
        ({"model_repository": "m", "cache_config": {"local": {"size": 0}}}, "valid 'size' field"),
        ({"model_repository": "m", "http_port": -1}, "'-1' is no port"),
        ({"model_repository": "m", "log_file": "x"}, "its logger is 'sluice'"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InferenceError) as caught:
        read_settings(options)
    assert caught.value.code is Code.INVALID_ARG
    assert text in caught.value.message


def test_every_option_that_stands_for_itself_is_known() -> None:
    class Recording(argparse.ArgumentParser):
        def format_help(self) -> str:
            return self.format_usage()

    parser = Recording(prog="x", add_help=False)
    serve.add_flags(parser)
    alone = {each.strip("[]") for each in parser.format_usage().split() if each[-1] == "]"}
    flags = {each for each in alone if each.startswith("--")}
    assert flags == {f"--{name.replace('_', '-')}" for name in SWITCHES}
