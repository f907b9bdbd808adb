"""vLLM's own server is started with the arguments of the gateway's engine."""

from pathlib import Path

import pytest

from loadtests.support.generation import read_model
from loadtests.support.servers import ServerFailed

CONFIG = """backend: "vllm"
parameters { key: "tool_call_parser" value { string_value: "hermes" } }
parameters { key: "reasoning_parser" value { string_value: "deepseek_r1" } }
"""


def model_folder(path: Path, config: str | None) -> Path:
    """A model with an engine argument; without a config if that is None."""
    version = path / "llm" / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text('{"model": "weights", "enforce_eager": true}')
    if config is not None:
        (version.parent / "config.pbtxt").write_text(config)
    return version.parent


def test_engine_arguments_and_parsers_become_flags(tmp_path: Path) -> None:
    model = read_model(model_folder(tmp_path, CONFIG))
    assert model.name == "llm"
    assert model.flags == (
        *("--model", "weights", "--enforce-eager"),
        *("--tool-call-parser", "hermes", "--enable-auto-tool-choice"),
        *("--reasoning-parser", "deepseek_r1"),
    )


def test_a_model_without_parsers_gets_no_flags_for_them(tmp_path: Path) -> None:
    model = read_model(model_folder(tmp_path, 'backend: "vllm"'))
    assert model.flags == ("--model", "weights", "--enforce-eager")


def test_arguments_that_the_file_leaves_open_have_the_gateways_defaults(tmp_path: Path) -> None:
    defaults = {"dtype": "float32", "enforce_eager": False}
    model = read_model(model_folder(tmp_path, 'backend: "vllm"'), defaults)
    assert model.flags == ("--dtype", "float32", "--enforce-eager", "--model", "weights")


def test_a_model_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match=r"no model of backend vllm: '.*config.pbtxt'"):
        read_model(model_folder(tmp_path, None))
