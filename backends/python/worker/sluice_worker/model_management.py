"""Loading, unloading and readiness of other models, for model.py."""

from typing import Any

from .errors import TritonModelException
from .protocol import ToGateway
from .worker_state import LifeStage, worker


def load_model(model_name: str, config: str = "", files: Any = None) -> None:
    """Load or reload a model; TritonModelException if that fails."""
    given = _files(model_name, files)
    sizes = [[name, len(data)] for name, data in given.items()]
    _ask(
        "Failed to load model",
        *(ToGateway.LOAD_MODEL, model_name, config, sizes),
        buffers=list(given.values()),
    )


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Begin to unload a model; TritonModelException if that fails."""
    _ask("Failed to unload model", ToGateway.UNLOAD_MODEL, model_name, bool(unload_dependents))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a version is ready; "" is the version that a request without one gets."""
    asked = (ToGateway.MODEL_READY, model_name, model_version)
    return bool(_ask("Failed to check model readiness", *asked))


def _ask(failure: str, kind: ToGateway, *values: Any, buffers: Any = ()) -> Any:
    asked = worker()
    if asked.stage in (LifeStage.STARTING, LifeStage.COMPLETING, LifeStage.FINALIZING):
        raise TritonModelException(
            f"{failure}: models cannot be asked for in 'auto_complete_config' and 'finalize'."
        )
    try:
        return asked.calls.ask(kind, *values, buffers=buffers)
    except TritonModelException as error:
        raise TritonModelException(f"{failure}: {error}") from None


def _files(model_name: str, files: Any) -> dict[str, bytes]:
    if files is None:
        return {}
    if not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and "
            "file contents"
        )
    for data in files.values():
        if not isinstance(data, bytes):
            kind = type(data).__name__
            raise TypeError(f"Object of type '{kind}' is not an instance of 'bytes'")
    return files
