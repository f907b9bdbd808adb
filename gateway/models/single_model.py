"""Repositories that are the folder of one model, as KServe's storage initializer makes them."""

import logging
import os
from pathlib import Path

from gateway.config.pbtxt import parse
from gateway.errors import Code, InferenceError
from gateway.models.homes import Home
from gateway.models.model_folder import CONFIG_FILE, RESERVED, version_number

log = logging.getLogger("sluice.repository")

VARIABLE, FOLDER = "the environment variable MODEL_NAME", "its folder"


def single_name(home: Home, named: str) -> str | None:
    """The name of the model if a repository is the folder of one model; None if it is not.

    The name is `named`, else that of its config.pbtxt, else the folder's. Raises INVALID_ARG for a
    name that is none, and for a folder with a config.pbtxt, with versions and with models.
    """
    files, folders = _content(home, "")
    has_config = CONFIG_FILE in files
    if not (has_config or _has_version(folders)):
        return None
    # Without a config.pbtxt a folder with a number may be a model, as in Triton.
    others = [each for each in folders if not (has_config and _has_version([each]))]
    models = [each for each in others if each not in RESERVED and _is_model(home, each)]
    here = Path(os.path.abspath(home.namespace)).name  # the name of a link, not of its target
    if models and not (has_config and _has_version(folders)):
        if has_config:  # as Triton, which reads no file at the top of a repository
            log.warning("file ignored", extra={"repository": here, "file": CONFIG_FILE})
        return None
    if models:
        raise InferenceError(
            Code.INVALID_ARG,
            f"repository '{here}' has a {CONFIG_FILE} and versions, as the folder of one model; "
            f"found models in it, too: {', '.join(models)}; expected one or the other: remove "
            f"{CONFIG_FILE}, or move the models to a repository of their own",
        )
    names = {VARIABLE: named, CONFIG_FILE: _configured(home), FOLDER: here}
    source = next((each for each in names if names[each]), FOLDER)
    return _checked(names[source], source)


def _content(home: Home, folder: str) -> tuple[set[str], list[str]]:
    """The names of files and of folders; none if the folder cannot be listed."""
    try:
        names = home.content(folder, folder)
    except InferenceError:
        return set(), []
    folders = [each.removesuffix("/") for each in names if each.endswith("/")]
    return {each for each in names if not each.endswith("/")}, folders


def _is_model(home: Home, folder: str) -> bool:
    files, folders = _content(home, folder)
    return CONFIG_FILE in files or _has_version(folders)


def _has_version(folders: list[str]) -> bool:
    return any(version_number(each) is not None for each in folders)


def _configured(home: Home) -> str:
    """The name in the configuration, "" if there is none; its errors are those of the load."""
    try:
        return parse(home.text(CONFIG_FILE, CONFIG_FILE), CONFIG_FILE).name
    except InferenceError:
        return ""


def _checked(name: str, source: str) -> str:
    if name in ("", ".", "..") or "/" in name or not name.isprintable() or name != name.strip():
        raise InferenceError(
            Code.INVALID_ARG,
            f"the repository is the folder of one model, which is named by {source}: found "
            f"{name!a}, expected printable characters without '/'",
        )
    return name
