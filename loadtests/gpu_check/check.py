"""The whole check: every part with its packages and devices, within one time limit."""

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from loadtests.gpu_check.outcome import KILL_SECS, STOP_SECS, Outcome, Status, run_part, table
from loadtests.gpu_check.parts import (
    CPU,
    CUDA,
    PARTS,
    ROOT,
    Asked,
    Part,
    cards,
    is_installed,
    missing,
    why_none,
    write_distribution,
)
from loadtests.support import rounds
from loadtests.support.rounds import save
from loadtests.support.servers import ENVIRONMENT

LIMIT_SECS = 600.0
SHORTEST_SECS = 15.0
"""With less time than that left, no part is begun."""
SIZES = {CUDA: ([1, 32, 256], 128, 3.0), CPU: ([1, 4], 16, 1.0)}
"""Streams, tokens of each answer, and seconds of a rate, where they are not asked for."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def main() -> None:
    """Check, print and save; the status is 1 if a part has failed."""
    parsed = _parser().parse_args()
    asked, console = _asked(parsed), Console()
    with rounds.failures_as_lines("gpu_check"), tempfile.TemporaryDirectory() as folder:
        outcomes = run(asked, parsed.limit_secs, chosen(parsed.parts), Path(folder), console)
    names = cards()
    console.print(
        table(
            f"Sluice on {', '.join(names) if asked.device == CUDA and names else asked.device}",
            outcomes,
        )
    )
    arguments = {**vars(parsed), **asked.as_json(), "cards": names}
    file = save("gpu_check", arguments, [each.as_json() for each in outcomes])
    rounds.tell_file(file, console)
    if any(each.status is Status.FAILED for each in outcomes):
        raise SystemExit(rounds.EXIT_FAILED)


def run(
    asked: Asked, limit_secs: float, parts: Sequence[Part], folder: Path, console: Console
) -> Sequence[Outcome]:
    """Run the parts one after the other; `folder` is for what they need to find."""
    deadline = time.monotonic() + limit_secs
    environment = _environment(folder)
    no_gpu = why_none()
    outcomes = []
    for part in parts:
        left = deadline - time.monotonic() - STOP_SECS - KILL_SECS
        reason = why_not(part, asked, no_gpu, left)
        if reason:
            outcome = Outcome(part=part.name, status=Status.SKIPPED, reason=reason)
        else:
            limit = min(part.limit_secs, left)
            with console.status(f"{part.name} ({part.asks}), at most {limit:.0f} s"):
                outcome = run_part(part, asked, limit, environment)
        console.print(f"{part.name}: {outcome.status}", highlight=False)
        outcomes.append(outcome)
    return outcomes


def why_not(part: Part, asked: Asked, no_gpu: str, left_secs: float) -> str:
    """Why a part is skipped; "" if it is not."""
    if asked.device == CUDA and no_gpu:
        return f"{no_gpu}; --device {CPU} tries what needs none"
    if part.only_gpu and asked.device != CUDA:
        return "this is about GPUs only"
    if lacking := missing(part.needs):
        return f"not installed: {', '.join(lacking)}"
    if left_secs < SHORTEST_SECS:
        return "no time was left: --limit-secs"
    return ""


def chosen(names: str) -> Sequence[Part]:
    """The parts of those names, in their own order; none named: all."""
    known = {part.name: part for part in PARTS}
    wanted = names.split(",") if names else list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"gpu_check: no part '{unknown[0]}'; there is: {', '.join(known)}")
    return [part for part in PARTS if part.name in wanted]


def _environment(folder: Path) -> Mapping[str, str]:
    """That of every part: without network, and with this source as what is installed."""
    path = [str(ROOT)]
    if not is_installed():
        write_distribution(folder / "site")
        path.append(str(folder / "site"))
    path += filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, **ENVIRONMENT, **OFFLINE, "PYTHONPATH": os.pathsep.join(path)}


def _asked(parsed: argparse.Namespace) -> Asked:
    streams, max_tokens, secs = SIZES[parsed.device]
    return Asked(
        device=parsed.device,
        streams=parsed.streams or streams,
        max_tokens=parsed.max_tokens or max_tokens,
        secs=parsed.secs or secs,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.gpu_check",
        description="Checks all parts of Sluice that need a GPU, and measures their cost.",
        epilog="Parts: " + "; ".join(f"{part.name}: {part.asks}" for part in PARTS),
    )
    parser.add_argument("--device", choices=tuple(SIZES), default=CUDA, help="(default: cuda)")
    parser.add_argument("--parts", default="", metavar="NAME,NAME", help="(default: all)")
    parser.add_argument("--streams", type=rounds.positive_list, metavar="N,N")
    parser.add_argument("--max-tokens", type=rounds.positive, metavar="N")
    parser.add_argument("--secs", type=float, metavar="SECS", help="of each rate of a tensor model")
    parser.add_argument(
        "--limit-secs",
        type=float,
        default=LIMIT_SECS,
        metavar="SECS",
        help="how long all of it may take (default: %(default)g)",
    )
    return parser
