"""A client that disconnects before any step of the loop: others are served, and nothing is left."""

from pathlib import Path

import pytest

from tests.sweep.cases import skipped
from tests.sweep.conftest import Run
from tests.sweep.stage import Stage
from tests.sweep.subjects import Subject
from tests.sweep.sweep import Choice, sweep_disconnects
from tests.sweep.ways import IN_PROCESS

SCENES = {IN_PROCESS: 30}
"""The number of scenes of a way in a sample."""
OTHERS = 8


def test_a_client_may_disconnect_at_every_step(
    subject: Subject,
    suffix: str,
    repository: Path,
    run: Run,
    choice: Choice,
    subtests: pytest.Subtests,
) -> None:
    async def main() -> None:
        async with Stage(subject, suffix, repository) as stage:
            for way in stage.ways:
                with subtests.test(way=str(way)):
                    try:
                        limit = SCENES.get(way.name, OTHERS)
                        await sweep_disconnects(await stage.server(), way, choice, limit)
                    except BaseException:
                        await stage.replace()
                        raise

    run(main)


@pytest.mark.parametrize(("reason", "count"), sorted(skipped().items()))
def test_impossible_combinations(reason: str, count: int) -> None:
    pytest.skip(f"{count} combinations of a model and a way: {reason}")
