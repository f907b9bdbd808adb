"""An instance that is lost before any step of the loop: it is replaced, and no request hangs."""

from pathlib import Path

from tests.sweep import events
from tests.sweep.conftest import Run
from tests.sweep.stage import Stage
from tests.sweep.subjects import BY_NAME, Subject
from tests.sweep.sweep import Choice

SCENES = 4


def suits(subject: Subject) -> bool:
    """Whether its instances can be lost; a request that killed a worker may not be repeated."""
    members = (subject, *(BY_NAME[name] for name in subject.needs))
    if subject.repeats or subject.endless:
        return False
    return any(each.has_worker or each.is_stand_in for each in members)


def test_instances_may_be_lost_at_every_step(
    subject: Subject, repository: Path, run: Run, choice: Choice
) -> None:
    async def main() -> None:
        async with Stage(subject, "", repository) as stage:
            await events.sweep(stage, choice, SCENES, events.lose)

    run(main)
