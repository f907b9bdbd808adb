"""A router whose replica is lost before any step of the loop: no request hangs at either end."""

from pathlib import Path

from tests.sweep import events
from tests.sweep.conftest import Run
from tests.sweep.stage import Stage
from tests.sweep.subjects import Subject
from tests.sweep.sweep import Choice

SCENES = 4


def suits(subject: Subject) -> bool:
    """Whether a replica hosts it."""
    return subject.at_replica


def test_the_connection_to_a_replica_may_be_lost_at_every_step(
    subject: Subject, repository: Path, run: Run, choice: Choice
) -> None:
    async def main() -> None:
        async with Stage(subject, "", repository) as stage:
            await events.sweep(stage, choice, SCENES, events.disconnect_replica)

    run(main)
