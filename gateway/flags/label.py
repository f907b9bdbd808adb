"""Options of `sluice label`."""

import argparse

from gateway.flags.values import add_url


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument(
        "changes",
        nargs="*",
        type=_change,
        metavar="LABEL=VERSION",
        help="name a loaded version; LABEL= removes a label; none: show the labels",
    )
    add_url(parser)


def _change(text: str) -> tuple[str, int | None]:
    label, equals, version = text.partition("=")
    if equals and (not version or (version.isascii() and version.isdigit())):
        return label, int(version) if version else None
    raise argparse.ArgumentTypeError(f"'{text}': expected LABEL=VERSION, such as champion=3")
