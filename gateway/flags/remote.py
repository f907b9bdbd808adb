"""Options of repositories in object storage: addresses, their cache, and settled changes."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from gateway.flags.values import add_truth, byte_size, seconds_or_never
from gateway.storage.mirror.settings import CacheBound, RemoteRepository
from gateway.storage.remote.addresses import AddressError, is_remote, parse_address
from gateway.storage.store import default_root

SHARE = re.compile(r"(\d{1,2}|100)%", re.ASCII)
MOUNTS = {
    "s3": "TRITON_AWS_MOUNT_DIRECTORY",
    "gs": "TRITON_GCS_MOUNT_DIRECTORY",
    "as": "TRITON_AZURE_MOUNT_DIRECTORY",
}
"""Triton's variables of the folder for files of each cloud."""
DEFAULTS = RemoteRepository(address="", root=Path())
CACHE = "remote"
"""The folder of the cache, next to that of models that `sluice fetch` unpacks."""


def place(text: str) -> Path | str:
    """A folder, or the address of a repository in object storage."""
    if not is_remote(text):
        return Path(text)
    try:
        parse_address(text)
    except AddressError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def bound(text: str) -> CacheBound:
    """A size such as 500GiB, or a percentage of the file system such as 80%."""
    if found := SHARE.fullmatch(text):
        return CacheBound(int(found[1]), is_percentage=True)
    try:
        return CacheBound(byte_size(text))
    except argparse.ArgumentTypeError:
        text = f"'{text}' is no size: expected such as 80%, 500GiB or 0"
        raise argparse.ArgumentTypeError(text) from None


def cache_root(scheme: str, environment: Mapping[str, str]) -> Path:
    """The folder of the cache of a cloud; StoreError if there is no place for it."""
    if folder := environment.get(MOUNTS[scheme]):
        return Path(folder)
    return default_root(environment).parent / CACHE


def cache_roots(environment: Mapping[str, str]) -> list[Path]:
    """The folders of the caches of all clouds; StoreError as `cache_root`."""
    return list(dict.fromkeys(cache_root(scheme, environment) for scheme in MOUNTS))


def repository(
    place: Path | str, flags: argparse.Namespace, environment: Mapping[str, str]
) -> Path | RemoteRepository:
    """The settings of a repository from the parsed options; StoreError as `cache_root`."""
    if isinstance(place, Path):
        return place
    return RemoteRepository(
        address=place,
        root=cache_root(place.partition(":")[0], environment),
        bound=flags.remote_cache_size,
        settle_secs=flags.repository_settle_secs,
        offline=flags.remote_offline,
    )


def add_flags(group: "argparse._ArgumentGroup") -> None:
    """Add the options of a server to a group."""
    _add_cache_flags(group)
    add_truth(
        group,
        "--remote-offline",
        DEFAULTS.offline,
        "serve what the cache has, without a request to object storage",
    )


def add_fetch_flags(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sluice fetch`."""
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="embedded models; or an address in object storage, and models of it; none: all",
    )
    _add_cache_flags(parser)
    parser.set_defaults(remote_offline=DEFAULTS.offline)
    parser.add_argument(
        "--model-config-name",
        default="",
        metavar="NAME",
        help="use a model's configs/NAME.pbtxt where it exists",
    )


def add_command_flags(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sluice cache`."""
    parser.add_argument(
        "action",
        choices=("list", "verify", "clean"),
        help="list: show the models; verify: compare each file with its hash, and delete damaged "
        "ones; clean: delete what no server uses",
    )


def _add_cache_flags(group: "argparse._ActionsContainer") -> None:
    group.add_argument(
        "--remote-cache-size",
        type=bound,
        default=DEFAULTS.bound,
        metavar="SIZE",
        help="most bytes of the cache of repositories in object storage, such as 500GiB or 80%% of "
        "its file system; 0 keeps only what is in use (default: 80%%)",
    )
    group.add_argument(
        "--repository-settle-secs",
        type=seconds_or_never,
        default=DEFAULTS.settle_secs,
        metavar="SECS",
        help="age of the newest object of a changed model in object storage before it is loaded "
        "(seconds, default: %(default)s)",
    )
