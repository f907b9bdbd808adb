"""A server that stops before any step of the loop: it ends, and nothing of it is left."""

from pathlib import Path

from tests.sweep import events
from tests.sweep.conftest import Run
from tests.sweep.stage import Stage
from tests.sweep.subjects import Subject
from tests.sweep.sweep import Choice

SCENES = 2


def test_the_server_may_stop_at_every_step(
    subject: Subject, repository: Path, run: Run, choice: Choice
) -> None:
    async def main() -> None:
        async with Stage(subject, "", repository) as stage:
            await events.sweep_stops(stage, choice, SCENES)

    run(main)
