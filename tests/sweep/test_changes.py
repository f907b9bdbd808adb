"""A model that is loaded again or unloaded before any step of the loop."""

from pathlib import Path

from tests.sweep import events
from tests.sweep.conftest import Run
from tests.sweep.stage import Stage
from tests.sweep.subjects import Subject
from tests.sweep.sweep import Choice

SCENES = 3


def suits(subject: Subject) -> bool:
    """Whether the server may change it: a router changes nothing at its replicas."""
    return not subject.at_replica and not subject.endless


def test_a_model_may_be_reloaded_at_every_step(
    subject: Subject, repository: Path, run: Run, choice: Choice
) -> None:
    async def main() -> None:
        async with Stage(subject, "", repository) as stage:
            await events.sweep(stage, choice, SCENES, events.reload)

    run(main)


def test_a_model_may_be_unloaded_at_every_step(
    subject: Subject, repository: Path, run: Run, choice: Choice
) -> None:
    async def main() -> None:
        async with Stage(subject, "", repository) as stage:
            await events.sweep(stage, choice, SCENES, events.unload)

    run(main)
