"""The process of one part: `python -m loadtests.gpu_check.part NAME ASKED FILE`."""

import importlib
import json
import signal
import sys
import time
from pathlib import Path

from loadtests.gpu_check.asked import Asked
from loadtests.gpu_check.outcome import Outcome, Skipped, Status, judged
from loadtests.rounds import LoadTestFailed
from loadtests.server import ServerFailed
from loadtests.sse import StreamFailed


def main() -> None:
    """Check, and write down what was found; what is not foreseen ends with a traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the servers
    name, asked, answer = sys.argv[1:]
    outcome = _check(name, Asked(**json.loads(asked)))
    written = Path(f"{answer}.written")
    written.write_text(json.dumps(outcome.as_json()))
    written.rename(answer)  # whole, or not there: this process may be killed at any time


def _check(name: str, asked: Asked) -> Outcome:
    began = time.monotonic()
    status, reason = Status.FAILED, ""
    try:
        rows = importlib.import_module(f"loadtests.gpu_check.{name}").check(asked)
        return judged(name, rows, time.monotonic() - began)
    except Skipped as error:
        status, reason = Status.SKIPPED, str(error)
    except (ServerFailed, StreamFailed, LoadTestFailed) as error:
        reason = str(error)
    return Outcome(part=name, status=status, reason=reason, secs=time.monotonic() - began)


if __name__ == "__main__":
    main()
