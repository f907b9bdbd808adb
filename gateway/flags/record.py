"""Options of `sluice record`."""

import argparse
from pathlib import Path

from gateway.flags.values import add_url, count, duration, pattern

MOST_SECS = 3600.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument(
        "--model-version",
        dest="version",
        default="",
        metavar="VERSION",
        help="its version or label (default: the one that answers requests without a version)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the files, such as the folder golden/ of the model; none is overwritten",
    )
    parser.add_argument(
        "--count",
        type=count,
        default=20,
        metavar="N",
        help="end after this number of requests (at most 1000, default: %(default)s)",
    )
    parser.add_argument(
        "--for",
        dest="secs",
        type=_secs,
        default="10m",
        metavar="TIME",
        help="end after this time, such as 30s, 10m or 1h (at most 1h, default: %(default)s)",
    )
    parser.add_argument(
        "--redact",
        type=pattern,
        default="",
        metavar="REGEX",
        help="replace texts that match in requests, before they are asked again and sent; answers "
        "with such a text are not expected (default: none)",
    )
    add_url(parser)


def _secs(text: str) -> float:
    if (found := duration(text)) <= MOST_SECS:
        return found
    raise argparse.ArgumentTypeError(f"'{text}' is too long: expected at most 1h")
