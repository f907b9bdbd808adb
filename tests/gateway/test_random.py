"""Three seconds of random clients on a server with every scheduler: nothing hangs, nothing is left.

`make soak ARGS='--minutes 10 --seed 7'` is the same for longer. A failure names the seed.
"""

import random
import sys
from pathlib import Path

import pytest

from loadtests.soak.probe import HOLD_SECS
from loadtests.soak.soak import Options, run
from tests.serving import EVERY_SERVER

SECS = 3.0

pytestmark = pytest.mark.runs_on("grpcio", "frontends")


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.timeout(240)
def test_random_clients_leave_a_server_that_answers_and_holds_nothing(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    sys.stdout.write(f"seed {seed}\n")
    report = run(Options(SECS, seed, EVERY_SERVER), tmp_path)
    assert report.tally.answered.total() > 0
    assert not report.failures, report.text
    assert report.tally.cuts or report.probes.worst.unexplained < HOLD_SECS, report.late
