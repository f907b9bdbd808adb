"""The versions that each load begins and keeps, as Triton 2.51 (its Python backend) did."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from gateway.models.model_folder import Override
from tests.builders import soon
from tests.gateway.models.lifecycles import EXPLICIT
from tests.registries import ALL_VERSIONS, ScriptedBackend, Start, write

ONE, TWO = (f"instance_group {{ kind: KIND_CPU count: {count} }}" for count in (1, 2))
SPECIFIC = "version_policy { specific { versions: [2, 3] } }"
LATEST = "version_policy { latest { num_versions: 1 } }"
PARAMETER = 'parameters { key: "x" value { string_value: "1" } }'
THIRD = """{"backend": "scripted", "version_policy": {"specific": {"versions": [3]}},
  "input": [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}],
  "output": [{"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]}],
  "instance_group": [{"kind": "KIND_CPU", "count": 2}],
  "parameters": {"x": {"string_value": "1"}}}"""


def configured(text: str) -> Callable[[Path], None]:
    return lambda folder: write(folder.parent, folder.name, more=text)


def unchanged(folder: Path) -> None:
    """Nothing has changed since the last load."""


def add_version(folder: Path) -> None:
    (folder / "4").mkdir()


def touch_version(folder: Path) -> None:
    os.utime(folder / "2" / "weights", ns=(1, 1))


def add_file(folder: Path) -> None:
    (folder / "labels.txt").write_text("x")


def remove_version(folder: Path) -> None:
    shutil.rmtree(folder / "1")


ANSWERS = [
    (unchanged, "", "123"),
    (add_version, "4", "1234"),
    (touch_version, "2", "1234"),
    (add_file, "1234", "1234"),
    (configured(ONE + SPECIFIC), "", "23"),
    (configured(ONE + LATEST), "4", "4"),
    (configured(ONE + ALL_VERSIONS), "123", "1234"),
    (configured(TWO + ALL_VERSIONS), "1234", "1234"),
    (remove_version, "", "234"),
    (configured(TWO + ALL_VERSIONS + PARAMETER), "234", "234"),
    (Override(THIRD), "", "3"),
]
"""The change before each load, the versions of new instances in Triton, and those it served."""


def counts(backend: ScriptedBackend) -> dict[str, int]:
    return {key.removeprefix("a "): len(found) for key, found in backend.instances.items()}


async def test_each_load_begins_and_keeps_the_versions_that_triton_does(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, 2, 3, more=ONE + ALL_VERSIONS)
    (tmp_path / "a" / "2" / "weights").touch()
    control = await start(startup=("a",), **EXPLICIT)
    for change, loaded, served in ANSWERS:
        before = dict.fromkeys("1234", 0) | counts(backend)
        if isinstance(change, Override):
            await soon(control.load("a", change))
        else:
            change(tmp_path / "a")
            await soon(control.load("a"))
        now = counts(backend)
        served_now = [model.version for model in control.registry.models()]
        new = "".join(number for number in before if now.get(number, 0) > before[number])
        assert (new, "".join(served_now)) == (loaded, served), change
