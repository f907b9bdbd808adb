"""By which names may OpenAI's clients ask for a model's LoRA adapters?"""

from pathlib import Path

import orjson

from gateway.errors import Code, InferenceError

FILE = "multi_lora.json"


def adapter_names(model: str, folder: Path) -> tuple[str, ...]:
    """The names in `multi_lora.json` of the version folder; none without such a file."""
    try:
        content = orjson.loads((folder / FILE).read_bytes())
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise _refusal(model, f"cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise _refusal(model, f"is not valid JSON: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(v, str) for v in content.values()):
        raise _refusal(model, "must be a JSON object of names and the folders of their adapters")
    return tuple(content)


def _refusal(model: str, why: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, f"model '{model}': its {FILE} {why}")
