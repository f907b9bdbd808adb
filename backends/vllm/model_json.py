"""What does `model.json` ask of the engine, and where is the model that it names?"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import orjson

from gateway.backend import ModelContext
from gateway.config import InstanceKind
from gateway.errors import Code, InferenceError

FILE = "model.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """What an engine is started with.

    `arguments` go to AsyncEngineArgs. `source` is the model as `model.json` names it, `place` says
    where it has been found. `folders` are the host's folders that a message must not show, each
    with what to show instead.
    """

    name: str
    arguments: Mapping[str, Any]
    source: str
    place: str
    folders: Mapping[str, str]


def read_engine_model(context: ModelContext) -> EngineModel:
    """Read `model.json` of the version folder and look for the model it names.

    Raises InferenceError for a file that is missing or no JSON object, and for settings that the
    model's instance group contradicts.
    """
    name = context.config.name
    arguments = _read(context.path, name)
    source = arguments.get("model")
    if not isinstance(source, str) or not source:
        _refuse(name, f"its {FILE} must name a model: the key 'model' is missing or no string")
    found, place = _find(source, context)
    return EngineModel(
        name=name,
        arguments=arguments | {"model": found} | _device(arguments, context),
        source=source,
        place=place,
        folders={
            str(context.path / source): source,
            str(context.store / source): source,
            str(context.path): "the version folder",
            str(context.store): "the model store",
        },
    )


def check_names(arguments: Mapping[str, Any], known: Collection[str], *, model: str) -> None:
    """Refuse a key that AsyncEngineArgs does not have, naming those that look like it."""
    for name in arguments:
        if name not in known:
            near = get_close_matches(name, known, n=3)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            _refuse(model, f"its {FILE} has the key '{name}', which vLLM does not know{hint}")


def hide_folders(message: str, folders: Mapping[str, str]) -> str:
    """The message without the paths of this host: clients read it."""
    for folder, shown in sorted(folders.items(), key=lambda pair: -len(pair[0])):
        message = message.replace(folder, shown)
    return HOST_PATH.sub("<path>", message)


HOST_PATH = re.compile(r"(?<![\w:/.])/(?:[\w.@+-]+/)+[\w.@+-]*")


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


def _find(source: str, context: ModelContext) -> tuple[str, str]:
    """What to give to vLLM as the model, and where it is in words."""
    for folder, place in ((context.path, "the version folder"), (context.store, "the model store")):
        if (folder / source / "config.json").is_file():
            return str(folder / source), place
    # Not a folder here: a hub id, or a path of the host. Untouched, as in Triton.
    return source, ""


def _device(arguments: Mapping[str, Any], context: ModelContext) -> dict[str, Any]:
    """The GPU that the instance group chooses; vLLM chooses itself for other kinds."""
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


def _size(arguments: Mapping[str, Any], key: str) -> int:
    value = arguments.get(key, 1)
    return value if isinstance(value, int) else 1


def _refuse(model: str, message: str) -> NoReturn:
    raise InferenceError(Code.INVALID_ARG, f"model '{model}': {message}")
