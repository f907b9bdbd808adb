"""Settings of a model: `model.json`, parameters of its config, and its LoRA adapters."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import orjson

from backends.python.worker.sluice_worker.errors import HOST_PATH
from backends.vllm.sleeper import LEVELS
from gateway.backend import ModelContext
from gateway.config import InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError
from gateway.openai_contract import further_names

ADAPTERS_FILE = "multi_lora.json"
ENABLED = "enable_lora"
PARAMETER = "lora_name"

FILE = "model.json"

CORES = "cpu_cores"
"""The config parameter with the cores of the engine. vLLM binds the threads of every engine to the
same cores, from the first on, so two engines on one CPU need different cores."""

CLIENTS = "api_server_count"
"""vLLM's name for the number of client processes of an engine; no argument of the engine."""

MAX_CLIENTS = 64

SLEEP_MODE = "enable_sleep_mode"

CHAT_TEMPLATE = "chat_template"
TOOL_CALL_PARSER = "tool_call_parser"
REASONING_PARSER = "reasoning_parser"
TRUST_TEMPLATE = "trust_request_chat_template"
MEDIA_DOMAINS = "allowed_media_domains"

NOWHERE = f"none, because the model's parameter '{MEDIA_DOMAINS}' lists none"
"""A domain that no address has: an empty list would allow every domain in vLLM."""

TRUTHS = {"true": True, "1": True, "false": False, "0": False, "": False}


class LoraRefusal(InferenceError):
    """The error of a request with an unknown adapter; its text is Triton's, without a prefix."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INVALID_ARG, message)


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """One adapter; its number is its place in the file, from 1."""

    number: int
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class LoraAdapters:
    """The adapters of a model by name; None if the model has LoRA disabled."""

    by_name: Mapping[str, LoraAdapter] | None = None

    def select(self, name: Any) -> LoraAdapter:
        """The adapter of that name; raises LoraRefusal if there is none."""
        if self.by_name is None:
            raise LoraRefusal("LoRA feature is not enabled.")
        adapter = self.by_name.get(name) if isinstance(name, str) else None
        if adapter is None:
            raise LoraRefusal(
                f"LoRA {name} is not supported, we currently support {list(self.by_name)}"
            )
        return adapter


def read_adapters(folder: Path, *, model: str) -> LoraAdapters:
    """Read `multi_lora.json` of the version folder; paths are relative to that folder."""
    try:
        content = orjson.loads((folder / ADAPTERS_FILE).read_bytes())
    except FileNotFoundError:
        raise _invalid(
            model, f"'{ENABLED}' is set, but its version folder has no {ADAPTERS_FILE}"
        ) from None
    except orjson.JSONDecodeError as error:
        raise _invalid(model, f"its {ADAPTERS_FILE} is not valid JSON: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(p, str) for p in content.values()):
        raise _invalid(
            model, f"its {ADAPTERS_FILE} must be an object of adapter names and their folders"
        )
    adapters = (
        LoraAdapter(number, name, str(folder / path))
        for number, (name, path) in enumerate(content.items(), start=1)
    )
    return LoraAdapters({adapter.name: adapter for adapter in adapters})


def _invalid(model: str, message: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, f"model '{model}': {message}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiSettings:
    """Settings of one model for OpenAI's requests and for the input `messages`.

    `chat_template` is the text of a template that replaces the model's own. `tool_call_parser`
    and `reasoning_parser` are names of vLLM, "" for none. Media are fetched only from the hosts
    `media_domains`; with None, from those in `model.json`.
    """

    chat_template: str | None = None
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    trust_request_chat_template: bool = False
    media_domains: tuple[str, ...] | None = None

    def engine_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The engine arguments that these settings override in those of `model.json`."""
        domains = self.media_domains
        if domains is None:
            domains = given.get(MEDIA_DOMAINS) or ()
        arguments: dict[str, Any] = {MEDIA_DOMAINS: list(domains) or [NOWHERE]}
        if self.reasoning_parser:
            arguments[REASONING_PARSER] = self.reasoning_parser
        return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """The settings of one engine.

    `arguments` are those of AsyncEngineArgs. `source` is the model as `model.json` names it;
    `local` is false if it is no folder of this host. `folders` maps folders of the host, which
    messages must not show, to their replacements. `cpu_cores` are the engine's cores, empty for
    all. `other_names` are further names of the model for OpenAI's clients. `clients` is the number
    of clients of the engine: 1 is the server itself, more are processes. `triton_metrics` adds
    metrics under Triton's names. `placement_group` is the id of the group of its Ray workers. It
    sleeps at vLLM's `sleep_level`; 0 closes it instead.
    """

    name: str
    version: str
    arguments: Mapping[str, Any]
    source: str
    local: bool
    folders: Mapping[str, str]
    cpu_cores: frozenset[int] = frozenset()
    openai: OpenAiSettings = field(default_factory=OpenAiSettings)
    other_names: tuple[str, ...] = ()
    adapters: LoraAdapters = field(default_factory=LoraAdapters)
    clients: int = 1
    triton_metrics: bool = False
    placement_group: str = ""
    sleep_level: int = 0

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of log lines about the model."""
        return {"model": self.name, "source": self.source}

    @property
    def whereabouts(self) -> str:
        """The places searched for the model, as the start of a message; "" if it was found."""
        if self.local:
            return ""
        fetch = "" if "/" in self.source else f" (run: sluice fetch {self.source})"
        return (
            f"its {FILE} names '{self.source}', which is neither a folder of its version folder "
            f"nor in the model store{fetch}, and vLLM does not get it elsewhere: "
        )


def read_engine_model(context: ModelContext, clients: int = 1) -> EngineModel:
    """Read `model.json` of the version folder and find the model that it names.

    `clients` is the default number of clients. Raises InferenceError for a file that is missing or
    no JSON object, and for settings that contradict the model's instance group.
    """
    name, config = context.config.name, context.config
    arguments = _read(context.path, name)
    clients = _clients(arguments, clients, model=name)
    source = arguments.get("model")
    if not isinstance(source, str) or not source:
        _refuse(name, f"its {FILE} must name a model: the key 'model' is missing or no string")
    found = _find(source, context)
    openai = read_openai_settings(config, context.path)
    derived = {"model": found or source} | openai.engine_arguments(arguments)
    sleep_level = engine_sleep(config)
    if sleep_level:
        derived[SLEEP_MODE] = True
    return EngineModel(
        name=name,
        version=context.path.name,
        arguments=arguments | derived | _device(arguments, context),
        source=source,
        local=found is not None,
        folders={
            str(context.path / source): source,
            str(context.store / source): source,
            str(context.path): "the version folder",
            str(context.store): "the model store",
        },
        cpu_cores=_cores(config.parameters.get(CORES, ""), model=name),
        openai=openai,
        other_names=tuple(further_names(config)),
        adapters=read_adapters(context.path, model=name)
        if lora_enabled(arguments)
        else LoraAdapters(),
        clients=clients,
        triton_metrics=is_true(config.parameters.get("REPORT_CUSTOM_METRICS", "")),
        sleep_level=sleep_level,
    )


def engine_sleep(config: ModelConfig) -> int:
    """The level of vLLM's sleep of a model, 0 if it is unloaded instead."""
    return LEVELS.get(config.parameters.get("sleep", ""), 0)


def lora_enabled(arguments: Mapping[str, Any]) -> bool:
    """Whether these engine arguments enable LoRA."""
    return is_true(arguments.get(ENABLED, False))


def is_true(value: Any) -> bool:
    """Whether a setting is true: a boolean, or a text as in Triton."""
    return value is True or (isinstance(value, str) and value.lower() == "true")


def check_names(arguments: Mapping[str, Any], known: Collection[str], *, model: str) -> None:
    """Refuse a key that AsyncEngineArgs does not have; the error names similar keys."""
    for name in arguments:
        if name not in known:
            near = get_close_matches(name, known, n=3)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            _refuse(model, f"its {FILE} has the key '{name}', which vLLM does not know{hint}")


def hide_folders(message: str, folders: Mapping[str, str]) -> str:
    """The message for clients: without paths of this host."""
    for folder, shown in sorted(folders.items(), key=lambda pair: -len(pair[0])):
        message = message.replace(folder, shown)
    return HOST_PATH.sub("<path>", message)


def _read(folder: Path, model: str) -> dict[str, Any]:
    try:
        content = orjson.loads((folder / FILE).read_bytes())
    except FileNotFoundError:
        _refuse(model, f"its version folder {folder.name} has no {FILE}")
    except OSError as error:
        _refuse(model, f"its {FILE} cannot be read: {error.strerror}")
    except orjson.JSONDecodeError as error:
        _refuse(model, f"its {FILE} is not valid JSON: {error}")
    if not isinstance(content, dict):
        _refuse(model, f"its {FILE} must be a JSON object of engine arguments")
    return content


def _find(source: str, context: ModelContext) -> str | None:
    """The folder that `source` names: in the version folder, in the store, or absolute."""
    for folder in (context.path / source, context.store / source):
        if (folder / "config.json").is_file():
            return str(folder)
    return None


def _device(arguments: Mapping[str, Any], context: ModelContext) -> dict[str, Any]:
    """The GPU of the instance group; for other kinds vLLM selects it."""
    name = context.config.name
    groups = [g for g in context.config.instance_group if g.kind is InstanceKind.KIND_GPU]
    gpus = [gpu for group in groups for gpu in group.gpus]
    if not groups:
        return {}
    world = _size(arguments, "tensor_parallel_size") * _size(arguments, "pipeline_parallel_size")
    if world > 1:
        _refuse(
            name,
            f"its {FILE} spreads it over {world} GPUs, so its instance group must be KIND_MODEL "
            "(found KIND_GPU)",
        )
    if len(gpus) > 1:
        _refuse(
            name,
            f"its instance groups name {len(gpus)} GPUs, but one instance of vLLM on one GPU is "
            "supported: name one, or use KIND_MODEL",
        )
    return {"device_ids": gpus} if gpus and "device_ids" not in arguments else {}


def _cores(text: str, *, model: str) -> frozenset[int]:
    """Cores from a list such as `0-3,8`."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not first.strip().isdigit() or not (last or first).strip().isdigit():
            _refuse(model, f"its parameter '{CORES}' is '{text}', expected a list such as '0-3,8'")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def _clients(arguments: dict[str, Any], default: int, *, model: str) -> int:
    """Remove the number of clients from the engine arguments, and return it."""
    alone = arguments.get("mm_tensor_ipc") == "torch_shm"  # only one client can pass tensors by it
    count = arguments.pop(CLIENTS, 1 if alone else min(default, MAX_CLIENTS))
    if alone and count != 1:
        _refuse(model, f"its {FILE} has mm_tensor_ipc 'torch_shm', which needs {CLIENTS} 1")
    if type(count) is not int or not 1 <= count <= MAX_CLIENTS:
        _refuse(
            model, f"its {FILE} has {CLIENTS} {count!r}, expected a number from 1 to {MAX_CLIENTS}"
        )
    return count


def _size(arguments: Mapping[str, Any], key: str) -> int:
    value = arguments.get(key, 1)
    return value if isinstance(value, int) else 1


def _refuse(model: str, message: str) -> NoReturn:
    raise InferenceError(Code.INVALID_ARG, f"model '{model}': {message}")


def read_openai_settings(config: ModelConfig, folder: Path) -> OpenAiSettings:
    """Read the parameters of a config; INVALID_ARG if one is unusable.

    `folder` is the version folder, which may have a file with a chat template.
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
    """The text of the template: an inline one has braces, else it is a file."""
    given = config.parameters.get(CHAT_TEMPLATE, "")
    if not given or "{" in given:
        return given or None
    file = (folder / given).resolve()
    if not file.is_relative_to(folder.resolve()) or not file.is_file():
        _refuse(
            config.name,
            f"its parameter '{CHAT_TEMPLATE}' is '{given}', expected a template or the name of a "
            "file in its version folder",
        )
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        _refuse(config.name, f"its {CHAT_TEMPLATE} '{given}' cannot be read: {_reason(error)}")


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.reason if isinstance(error, UnicodeDecodeError) else str(error.strerror)


def _truth(config: ModelConfig, name: str) -> bool:
    given = config.parameters.get(name, "")
    truth = TRUTHS.get(given.lower())
    if truth is None:
        _refuse(config.name, f"its parameter '{name}' is '{given}', expected true or false")
    return truth


def _listed(text: str) -> list[str]:
    return [part.strip().lower() for part in text.split(",") if part.strip()]
