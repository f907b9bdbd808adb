"""The flags of streams that a client can come back to."""

import argparse

from gateway.flags.values import count, seconds
from gateway.settings import ResumptionSettings


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add them to those of `sluice serve`."""
    group, defaults = parser.add_argument_group("resumable streams"), ResumptionSettings()
    group.add_argument(
        "--resumable-grace-secs",
        type=seconds,
        default=defaults.grace_secs,
        metavar="SECS",
        help="how long a stream that is resumable waits for its client (default: %(default)s)",
    )
    group.add_argument(
        "--resumable-buffer-size",
        type=count,
        default=defaults.buffer_size,
        metavar="BYTES",
        help="how much of a stream is kept for clients that come back (default: %(default)s)",
    )
    group.add_argument(
        "--resumable-total-size",
        type=count,
        default=defaults.total_size,
        metavar="BYTES",
        help="how much all these streams may take together (default: %(default)s)",
    )


def resumption_settings(flags: argparse.Namespace) -> ResumptionSettings:
    """What the flags say."""
    return ResumptionSettings(
        grace_secs=flags.resumable_grace_secs,
        buffer_size=flags.resumable_buffer_size,
        total_size=flags.resumable_total_size,
    )
