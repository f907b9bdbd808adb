"""Values of options, and groups of options; a refused value becomes a usage error."""

import argparse
import re
from collections.abc import Sequence
from urllib.parse import SplitResult, urlsplit

from gateway.durations import read_seconds
from gateway.errors import Code, InferenceError
from gateway.policy.caller import read_hosts
from gateway.policy.control import ChangeControl
from gateway.policy.keys import API_KEY
from gateway.policy.pages import read_origins
from gateway.policy.restrictions import Restrictions, read_restrictions
from gateway.settings import UNIX

TRUE = frozenset({"true", "on", "1"})
FALSE = frozenset({"false", "off", "0"})
ZERO = frozenset({"0", "0.0"})
DEFAULT_URL = "http://localhost:8000"


UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SIZE = re.compile(r"([0-9]{1,15})(KiB|MiB|GiB|TiB)?")


def byte_size(text: str) -> int:
    """A number of bytes, with or without a unit, such as 24GiB."""
    if found := SIZE.fullmatch(text):
        return int(found[1]) * UNITS[found[2] or ""]
    raise argparse.ArgumentTypeError(
        f"'{text}' is no size: expected a whole number of bytes, or such as 512MiB or 24GiB"
    )


def truth(text: str) -> bool:
    """A boolean as in Triton's options."""
    if text.lower() in TRUE | FALSE:
        return text.lower() in TRUE
    raise argparse.ArgumentTypeError(f"invalid value for bool option: {text}")


def port(text: str) -> int:
    """A port number; 0 picks a free one."""
    if text.isdigit() and int(text) < 2**16:
        return int(text)
    raise argparse.ArgumentTypeError(f"'{text}' is no port: expected 0 to {2**16 - 1}")


def address(option: str, text: str) -> str:
    """A host, an IPv6 address without brackets, or `unix:` and a path; INVALID_ARG without it."""
    if not text.startswith(UNIX):
        return text.removeprefix("[").removesuffix("]")
    path = text.removeprefix(UNIX)
    # gRPC (naming): unix:path, or unix:///absolute_path.
    path = path.removeprefix("//") if path.startswith("///") else path
    if not path:
        raise InferenceError(
            Code.INVALID_ARG, f"{option} '{text}' has no path, expected such as unix:/run/s"
        )
    return UNIX + path


def url(text: str) -> SplitResult:
    """The URL of a port of HTTP, also without its scheme."""
    try:
        found = urlsplit(text if "://" in text else f"http://{text}")
        is_known = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:
        is_known = False
    if is_known:
        return found
    raise argparse.ArgumentTypeError(
        f"'{text}': expected the URL of a port, as in http://localhost:8000"
    )


def seconds(text: str) -> float:
    """A duration of more than zero seconds."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if 0 < found < float("inf"):
        return found
    raise argparse.ArgumentTypeError(f"'{text}' is no duration: expected seconds, more than 0")


def seconds_or_never(text: str) -> float:
    """A duration in seconds; 0 turns the limit off."""
    return 0.0 if text in ZERO else seconds(text)


def duration(text: str) -> float:
    """Seconds of a duration with its unit."""
    if found := read_seconds(text):
        return found
    raise argparse.ArgumentTypeError(f"'{text}' is no duration: expected such as 30s, 10m, 1h")


def count(text: str) -> int:
    """A whole number of at least 1."""
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"'{text}': expected a whole number of at least 1")


def natural(text: str) -> int:
    """A whole number of at least 0."""
    if text.isascii() and text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"'{text}': expected a whole number of at least 0")


def milliseconds(text: str) -> int:
    """A whole number of milliseconds within Triton's int."""
    if text.isascii() and text.isdigit() and int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(
        f"'{text}': expected a whole number of milliseconds, 0 to {2**31 - 1}"
    )


def pattern(text: str) -> str:
    """A regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"'{text}' is no regular expression: {error}") from None
    return text


OF_KEY = f"; {API_KEY} in the environment is its API key"


def add_url(parser: argparse.ArgumentParser, remark: str = OF_KEY) -> None:
    """Add the option of a running server."""
    parser.add_argument(
        "--url",
        type=url,
        default=DEFAULT_URL,
        metavar="URL",
        help=f"the HTTP port of a running server (default: %(default)s){remark}",
    )


def add_restrictions(group: "argparse._ArgumentGroup", option: str, header: str) -> None:
    """Add Triton's option that restricts areas; `header` says where the value stands."""
    group.add_argument(
        option,
        action="append",
        default=[],
        metavar="AREA[,AREA...]:NAME=VALUE",
        help=f"requests of these areas need {header} with that value, or with that of the file in "
        "@FILE; repeatable (default: none)",
    )


def restrictions(option: str, groups: Sequence[str], kind: str) -> Restrictions:
    """The restrictions of the groups given by an option; INVALID_ARG if one is wrong."""
    try:
        return read_restrictions(groups, kind)
    except ValueError as error:
        raise InferenceError(Code.INVALID_ARG, f"{option}: {error}") from None


CORS = "--cors-origin"


def add_origins(group: "argparse._ArgumentGroup") -> None:
    """Add the option of pages of other origins."""
    group.add_argument(
        CORS,
        action="append",
        default=[],
        metavar="ORIGIN",
        help="answer pages of this origin, as in https://app.example, by CORS; * for pages of all "
        "origins, without --api-keys and --jwt-jwks; repeatable (default: none)",
    )


def origins(flags: argparse.Namespace) -> frozenset[str]:
    """The origins from the parsed options; INVALID_ARG for one that is none, or is refused."""
    try:
        has_keys = flags.api_keys is not None or flags.jwt_jwks is not None
        return read_origins(flags.cors_origin, with_keys=has_keys)
    except ValueError as error:
        raise InferenceError(Code.INVALID_ARG, f"{CORS}: {error}") from None


HOSTS = "--allowed-hosts"


def add_control(group: "argparse._ArgumentGroup") -> None:
    """Add the options of changes of the server."""
    add_truth(
        group,
        "--open-control",
        ChangeControl().is_open,
        "let every machine load models, register shared memory and change log and trace settings, "
        "as Triton does; otherwise only this one may",
    )
    group.add_argument(
        HOSTS,
        action="append",
        default=[],
        metavar="HOST[,HOST...]",
        help="further names and addresses of this machine in the header Host of such requests and "
        "of pages, without port; repeatable (default: none, localhost and loopback addresses are "
        "known)",
    )


def control(flags: argparse.Namespace) -> ChangeControl:
    """The condition of changes from the parsed options; INVALID_ARG for a host that is none."""
    try:
        return ChangeControl(flags.open_control, read_hosts(flags.allowed_hosts))
    except ValueError as error:
        raise InferenceError(Code.INVALID_ARG, f"{HOSTS}: {error}") from None


def add_listener(
    group: "argparse._ArgumentGroup", protocol: str, address: str, default_port: int
) -> None:
    """Add the options of one protocol: whether it listens, and where."""
    add_truth(group, f"--allow-{protocol}", True, "serve it")
    group.add_argument(
        f"--{protocol}-address",
        default=address,
        metavar="ADDR",
        help="address to listen on (default: %(default)s)",
    )
    group.add_argument(
        f"--{protocol}-port",
        type=port,
        default=default_port,
        metavar="PORT",
        help="0 picks a free one (default: %(default)s)",
    )


def add_truth(group: "argparse._ArgumentGroup", flag: str, default: bool, text: str) -> None:
    """Add an option with the value true or false."""
    group.add_argument(
        flag,
        type=truth,
        default=default,
        metavar="true|false",
        help=f"{text} (default: {str(default).lower()})",
    )
