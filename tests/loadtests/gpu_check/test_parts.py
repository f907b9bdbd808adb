"""What is missing is told by the name under which it can be installed."""

import subprocess
import sys

from loadtests.gpu_check.parts import CORE, PARTS, missing


def test_what_is_there_is_not_missing() -> None:
    assert missing(("json", "importlib.metadata")) == []


def test_a_distribution_may_have_a_name_of_its_own() -> None:
    assert missing(("no_such.inner", "no_such_module")) == ["no-such.inner", "no-such-module"]
    lacking = missing(("pynvml",))
    assert lacking in ([], ["nvidia-ml-py"])


def test_every_part_needs_what_the_check_itself_needs() -> None:
    assert all(set(CORE) <= set(part.needs) for part in PARTS)


def test_a_python_without_any_package_is_told_all_of_them() -> None:
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "loadtests.gpu_check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "nothing can be checked without" in ended.stderr
    for name in ("orjson", "protobuf", "sse-starlette", "vllm"):
        assert name in ended.stderr
    assert "Traceback" not in ended.stderr
