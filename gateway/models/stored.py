"""Where are the files of a version: in its folder, or in the store that `sluice fetch` fills?"""

from pathlib import Path

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.storage.store import ModelStore, StoreError

STORED_MODEL = "stored_model"
"""Parameter of a model: the name under which `sluice fetch` stored what its backend loads."""


def files_folder(config: ModelConfig, version: Path, store: Path) -> Path:
    """The folder whose files the backend loads: `version`, or a stored model if the config says so.

    A version that has the model's own file keeps its folder: a model.py finds there what belongs
    to it, and is told where the stored model is. Raises InferenceError: INVALID_ARG for a name that
    is a path, UNAVAILABLE if it is not stored.
    """
    name = config.parameters.get(STORED_MODEL)
    if name is None:
        return version
    models = ModelStore(store)
    try:
        folder = models.path(name)
    except StoreError as error:
        raise InferenceError(
            Code.INVALID_ARG, f"model '{config.name}': parameter '{STORED_MODEL}': {error}"
        ) from None
    if not _is_stored(models, name):
        raise InferenceError(
            Code.UNAVAILABLE,
            f"model '{config.name}': its parameter '{STORED_MODEL}' names '{name}', which is not "
            f"in the model store, or damaged there; run: sluice fetch {name}",
        )
    own = config.default_model_filename
    return version if own and (version / own).exists() else folder


def _is_stored(models: ModelStore, name: str) -> bool:
    try:
        return models.has(name)
    except StoreError:  # its text names folders of this host; `sluice fetch` tells it
        return False
