"""Settings in a config for OpenAI's requests, and the engine's arguments for them."""

from pathlib import Path

import pytest

from backends.vllm.settings import NOWHERE, OpenAiSettings, read_openai_settings
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError

INLINE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def read(folder: Path, **parameters: str) -> OpenAiSettings:
    config = ModelConfig(name="llama", backend="vllm", parameters=parameters)
    return read_openai_settings(config, folder)


def refusal(folder: Path, **parameters: str) -> str:
    with pytest.raises(InferenceError) as caught:
        read(folder, **parameters)
    assert caught.value.code is Code.INVALID_ARG
    return caught.value.message


def test_without_parameters_the_model_decides(tmp_path: Path) -> None:
    assert read(tmp_path) == OpenAiSettings()


def test_every_parameter_is_read(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        chat_template=INLINE,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        trust_request_chat_template="True",
        allowed_media_domains="Example.com, images.example.com,",
    )
    assert settings == OpenAiSettings(
        chat_template=INLINE,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        trust_request_chat_template=True,
        media_domains=("example.com", "images.example.com"),
    )


def test_a_template_may_be_a_file_of_the_version_folder(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(INLINE)
    assert read(tmp_path, chat_template="chat.jinja").chat_template == INLINE


@pytest.mark.parametrize("name", ["nowhere.jinja", "../secret.jinja", "/etc/passwd", "."])
def test_a_template_that_is_no_file_of_the_version_folder_is_refused(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "secret.jinja").write_text(INLINE)
    folder = tmp_path / "1"
    folder.mkdir()
    assert refusal(folder, chat_template=name) == (
        f"model 'llama': its parameter 'chat_template' is '{name}', expected a template or the "
        "name of a file in its version folder"
    )


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_bytes(b"\xff")
    assert "its chat_template 'chat.jinja' cannot be read" in refusal(
        tmp_path, chat_template="chat.jinja"
    )


def test_a_truth_must_be_one(tmp_path: Path) -> None:
    assert refusal(tmp_path, trust_request_chat_template="maybe") == (
        "model 'llama': its parameter 'trust_request_chat_template' is 'maybe', expected true or "
        "false"
    )


@pytest.mark.parametrize(
    ("parameters", "given", "domains"),
    [
        ({}, {}, [NOWHERE]),
        ({}, {"allowed_media_domains": []}, [NOWHERE]),
        ({}, {"allowed_media_domains": ["a.org"]}, ["a.org"]),
        ({"allowed_media_domains": ""}, {"allowed_media_domains": ["a.org"]}, [NOWHERE]),
        ({"allowed_media_domains": "b.org"}, {"allowed_media_domains": ["a.org"]}, ["b.org"]),
    ],
)
def test_media_come_from_nowhere_unless_a_host_is_listed(
    tmp_path: Path, parameters: dict[str, str], given: dict[str, list[str]], domains: list[str]
) -> None:
    arguments = read(tmp_path, **parameters).engine_arguments(given)
    assert arguments == {"allowed_media_domains": domains}


def test_the_engine_gets_the_parser_of_reasoning(tmp_path: Path) -> None:
    arguments = read(tmp_path, reasoning_parser="qwen3").engine_arguments({})
    assert arguments["reasoning_parser"] == "qwen3"
