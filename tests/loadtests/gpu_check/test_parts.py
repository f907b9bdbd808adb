"""Missing packages, by the names of their distributions."""

import subprocess
import sys

from loadtests.gpu_check.parts import CORE, PARTS, missing


def test_an_installed_module_is_not_missing() -> None:
    assert missing(("json", "importlib.metadata")) == []


def test_a_distribution_may_have_a_name_of_its_own() -> None:
    assert missing(("no_such.inner", "no_such_module")) == ["no-such.inner", "no-such-module"]
    lacking = missing(("pynvml",))
    assert lacking in ([], ["nvidia-ml-py"])


def test_every_part_needs_the_packages_of_the_check() -> None:
    assert all(set(CORE) <= set(part.needs) for part in PARTS)


def test_a_python_without_packages_gets_the_list_of_all() -> None:
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "loadtests", "gpu_check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "nothing can be checked without" in ended.stderr
    for name in ("orjson", "protobuf", "uvicorn", "vllm"):
        assert name in ended.stderr
    assert "Traceback" not in ended.stderr
