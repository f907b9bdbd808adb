"""Needs of some tests from a machine: without it they are skipped, in CI (`CI=true`) they fail."""

import os
import shutil
from collections.abc import Iterable
from typing import NoReturn

import pytest

PREFIX = "needs "
IN_CI = os.environ.get("CI") == "true"


def lacking(what: str, fix: str) -> NoReturn:
    """Skip or fail the test, by a reason that is the same for every test that needs this."""
    reason = f"{PREFIX}{what}: {fix}"
    if IN_CI:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def skip_own_models(items: Iterable[pytest.Item]) -> None:
    """Skip the tests marked `own_models`, by the subject that a router does not have."""
    for item in items:
        marker = item.get_closest_marker("own_models")
        if marker is not None:
            (what,) = marker.args
            reason = f"{PREFIX}{what} in the server itself: run it without --fleet"
            item.add_marker(pytest.mark.skip(reason=reason))


def folded(report: pytest.TestReport) -> pytest.TestReport:
    """The report of a test; those that were skipped by one reason have one place, so one line."""
    place = report.longrepr
    if report.skipped and isinstance(place, tuple):
        reason = place[2]
        if reason.removeprefix("Skipped: ").startswith(PREFIX):
            report.longrepr = (__file__, lacking.__code__.co_firstlineno, reason)
    return report


def program(*names: str, package: str) -> str:
    """The path of the first of these programs; `package` is Debian's name for it."""
    found = next((path for name in names if (path := shutil.which(name))), None)
    return found or lacking(" or ".join(names), f"apt-get install {package}")


def c_compiler() -> str:
    """The path of a C compiler."""
    return program("cc", package="gcc")


def inductor() -> None:
    """Torch compiles C++."""
    from backends.vllm.machine import missing_build_tools

    if missing := missing_build_tools():
        lacking(" and ".join(missing), f"apt-get install {' '.join(missing.values())}")
