"""Options of `sluice rollout`."""

import argparse

from gateway.flags.values import DEFAULT_URL, natural, url
from gateway.policy.keys import API_KEY


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the actions, with their options, to the parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    status = _action(actions, "status", "show the rollouts", model="?")
    status.add_argument("--watch", action="store_true", help="show changes until interrupted")
    start = _action(actions, "start", "begin the rollout of a version")
    start.add_argument("version", type=natural, metavar="VERSION")
    start.add_argument(
        "--step",
        action="append",
        default=[],
        metavar="WEIGHT%:TIME",
        help="a step in place of those of rollout.json, such as 10%%:10m; repeatable",
    )
    start.add_argument(
        "--again", action="store_true", help="also a version that was rolled back with these files"
    )
    changes = [
        start,
        _action(actions, "pause", "keep the present weight until resume"),
        _action(actions, "resume", "continue a paused rollout"),
        _action(actions, "promote", "make the new version stable now"),
        _action(actions, "abort", "return every request to the stable version now"),
        weight := _action(actions, "weight", "set the weight of the new version, and pause"),
    ]
    weight.add_argument("weight", type=_percentage, metavar="PERCENT")
    for each in changes:
        each.add_argument(
            "--reason", default="", metavar="TEXT", help="for the history and the audit log"
        )
    _action(actions, "history", "show the changes of the rollouts of a model")
    wait = _action(
        actions,
        "wait",
        "wait for the end of a rollout: exit status 0 promoted, 3 paused, 4 rolled back, aborted "
        "or superseded, 5 not ended in time",
    )
    wait.add_argument(
        "--timeout", metavar="TIME", help="longest wait, such as 30s or 2h (default: none)"
    )


def _action(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    model: str | None = None,
) -> argparse.ArgumentParser:
    made = actions.add_parser(name, help=text, description=text)
    made.add_argument("model", metavar="MODEL", nargs=model)
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument(
        "--url",
        action="append",
        type=url,
        metavar="URL",
        help=f"a server; repeatable (default: {DEFAULT_URL}); {API_KEY} in the environment is "
        "its API key",
    )
    return made


def _percentage(text: str) -> float:
    try:
        return float(text.removesuffix("%"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}': expected a percentage, as in 25") from None
