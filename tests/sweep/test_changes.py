"""A model that is loaded again, unloaded or rolled back, and one version alone, at any step."""

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


def test_a_version_may_be_loaded_alone_at_every_step(
    subject: Subject, repository: Path, run: Run, choice: Choice
) -> None:
    async def main() -> None:
        async with Stage(subject, "", repository) as stage:
            await events.sweep(stage, choice, SCENES, events.load_version)

    run(main)


def test_a_version_may_be_rolled_back_at_every_step(
    subject: Subject, repository: Path, run: Run, choice: Choice
) -> None:
    async def main() -> None:
        async with Stage(subject, "", repository) as stage:
            server = await stage.server()
            await server.begin_rollout()  # the state directory is open from now on
            server.roll_back()
            await server.alone()
            await events.sweep(stage, choice, SCENES, events.roll_back)

    run(main)
