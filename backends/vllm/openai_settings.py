"""What does a model's config say about how it serves OpenAI's requests?"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError

CHAT_TEMPLATE = "chat_template"
TOOL_CALL_PARSER = "tool_call_parser"
REASONING_PARSER = "reasoning_parser"
TRUST_TEMPLATE = "trust_request_chat_template"
MEDIA_DOMAINS = "allowed_media_domains"

NOWHERE = f"none, because the model's parameter '{MEDIA_DOMAINS}' lists none"
"""A domain that no address has: to vLLM an empty list allows every domain."""

TRUTHS = {"true": True, "1": True, "false": False, "0": False, "": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiSettings:
    """The settings of one model; conversations in `messages` follow them, too.

    `chat_template` is the text of a template that replaces the model's own. `tool_call_parser`
    and `reasoning_parser` are names of vLLM's, "" for none. `media_domains` are the hosts from
    which images and the like may be fetched; None leaves it to `model.json`.
    """

    chat_template: str | None = None
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    trust_request_chat_template: bool = False
    media_domains: tuple[str, ...] | None = None

    def engine_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What these settings change in the engine arguments of `model.json`."""
        domains = self.media_domains
        if domains is None:
            domains = given.get(MEDIA_DOMAINS) or ()
        arguments: dict[str, Any] = {MEDIA_DOMAINS: list(domains) or [NOWHERE]}
        if self.reasoning_parser:
            arguments[REASONING_PARSER] = self.reasoning_parser
        return arguments


def read_openai_settings(config: ModelConfig, folder: Path) -> OpenAiSettings:
    """Read the parameters of a config; INVALID_ARG if one cannot be used.

    `folder` is the version folder, where a file with a chat template lies.
    """
    given = config.parameters
    domains = given.get(MEDIA_DOMAINS)
    return OpenAiSettings(
        chat_template=_template(config, folder),
        tool_call_parser=given.get(TOOL_CALL_PARSER, ""),
        reasoning_parser=given.get(REASONING_PARSER, ""),
        trust_request_chat_template=_truth(config, TRUST_TEMPLATE),
        media_domains=None if domains is None else tuple(_listed(domains)),
    )


def _template(config: ModelConfig, folder: Path) -> str | None:
    """The text of the template: inline, which has braces, or in a file of the version folder."""
    given = config.parameters.get(CHAT_TEMPLATE, "")
    if not given or "{" in given:
        return given or None
    file = (folder / given).resolve()
    if not file.is_relative_to(folder.resolve()) or not file.is_file():
        _refuse(
            config,
            f"its parameter '{CHAT_TEMPLATE}' is '{given}', expected a template or the name of a "
            "file in its version folder",
        )
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        _refuse(config, f"its {CHAT_TEMPLATE} '{given}' cannot be read: {_reason(error)}")


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.reason if isinstance(error, UnicodeDecodeError) else str(error.strerror)


def _truth(config: ModelConfig, name: str) -> bool:
    given = config.parameters.get(name, "")
    truth = TRUTHS.get(given.lower())
    if truth is None:
        _refuse(config, f"its parameter '{name}' is '{given}', expected true or false")
    return truth


def _listed(text: str) -> list[str]:
    return [part.strip().lower() for part in text.split(",") if part.strip()]


def _refuse(config: ModelConfig, message: str) -> NoReturn:
    raise InferenceError(Code.INVALID_ARG, f"model '{config.name}': {message}")
