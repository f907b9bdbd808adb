"""Values of options, and groups of options; a refused value becomes a usage error."""

import argparse
import re

TRUE = frozenset({"true", "on", "1"})
FALSE = frozenset({"false", "off", "0"})
ZERO = frozenset({"0", "0.0"})


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
