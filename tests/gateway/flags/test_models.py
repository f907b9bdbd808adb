"""Options of models become ModelSettings; conflicting options are refused."""

import argparse
import logging
from pathlib import Path

import pytest

from gateway.errors import InferenceError
from gateway.flags import models as model_flags
from gateway.settings import ControlMode, ModelSettings, ResourceLimit


def parse(*arguments: str) -> ModelSettings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    model_flags.add_flags(parser)
    return model_flags.model_settings(parser.parse_args(["--model-repository=models", *arguments]))


def test_defaults_are_tritons() -> None:
    settings = parse()
    assert settings.control_mode is ControlMode.NONE
    assert (settings.poll_secs, settings.startup) == (15, ())
    assert (settings.load_thread_count, settings.load_retry_count) == (4, 0)
    assert settings.auto_complete
    assert not settings.namespacing
    assert settings.backends == {}
    assert (settings.rate_limit, settings.resource_limits) == (False, ())


def test_models_to_load_first_are_named_one_by_one() -> None:
    settings = parse("--model-control-mode=explicit", "--load-model=b", "--load-model", "a")
    assert (settings.control_mode, settings.startup) == (ControlMode.EXPLICIT, ("b", "a"))


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_naming_models_wants_explicit_control(mode: str) -> None:
    with pytest.raises(InferenceError) as caught:
        parse(f"--model-control-mode={mode}", "--load-model=a")
    assert caught.value.message == (
        "Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well."
    )


def test_every_model_is_the_only_name() -> None:
    explicit = "--model-control-mode=explicit"
    assert parse(explicit, "--load-model=*").startup == ("*",)
    with pytest.raises(InferenceError) as caught:
        parse(explicit, "--load-model=*", "--load-model=a")
    assert caught.value.message == (
        "Wildcard model name '*' must be the ONLY startup model if specified at all."
    )


def test_settings_of_backends_are_kept_by_backend() -> None:
    settings = parse(
        "--backend-config=onnxruntime,intra_op_thread_count=2",
        "--backend-config=onnxruntime,path=a=b,c",
        "--backend-config=default-max-batch-size=8",
    )
    assert settings.backends == {
        "onnxruntime": {"intra_op_thread_count": "2", "path": "a=b,c"},
        "": {"default-max-batch-size": "8"},
    }


@pytest.mark.parametrize(
    ("flags", "directory"),
    [
        ((), None),
        (("--backend-directory=/a",), Path("/a")),
        (("--backend-config=backend-directory=/b",), Path("/b")),
        (("--backend-config=backend-directory=/b", "--backend-directory=/a"), Path("/a")),
        (("--backend-config=python,backend-directory=/b",), None),
    ],
)
def test_the_backend_directory_is_a_flag_or_a_setting_of_all_backends(
    flags: tuple[str, ...], directory: Path | None
) -> None:
    assert parse(*flags).backend_directory == directory


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--model-control-mode", "automatic"),
        ("--repository-poll-secs", "0"),
        ("--model-load-retry-count", "-1"),
        ("--model-namespacing", "maybe"),
        ("--backend-config", "onnxruntime"),
        ("--backend-config", "onnxruntime,threads"),
        ("--backend-config", "=2"),
        ("--rate-limit", "foo"),
        ("--golden", "lax"),
        ("--rate-limit-resource", "R"),
        ("--rate-limit-resource", ":1"),
        ("--rate-limit-resource", "R:1:2:3"),
        ("--rate-limit-resource", "R:-1"),
        ("--rate-limit-resource", "R:1:x"),
    ],
)
def test_a_bad_value_is_refused_with_what_was_found(flag: str, value: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=value):
        parse(f"{flag}={value}")


def test_auto_complete_can_be_switched_off_in_two_ways(caplog: pytest.LogCaptureFixture) -> None:
    assert not parse("--disable-auto-complete-config").auto_complete
    assert caplog.records == []
    assert not parse("--strict-model-config=true").auto_complete
    assert parse("--strict-model-config=false").auto_complete
    told = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert (
        told
        == [
            "'--strict-model-config' has been deprecated! Please use "
            "'--disable-auto-complete-config' instead."
        ]
        * 2
    )


def test_resources_are_limited_on_a_device_or_on_each_and_the_smaller_limit_counts() -> None:
    settings = parse(
        "--rate-limit=execution_count",
        "--rate-limit-resource=R:3",
        "--rate-limit-resource=R:4:0",
        "--rate-limit-resource=R:1",
        "--rate-limit-resource=S:0:1",
    )
    assert settings.rate_limit
    assert set(settings.resource_limits) == {
        ResourceLimit("R", 1),
        ResourceLimit("R", 4, 0),
        ResourceLimit("S", 0, 1),
    }
