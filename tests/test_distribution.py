"""Distribution of test modules among the processes of pytest-xdist."""

import pytest

from tests.distribution import ENGINES, LONG, OTHER_SERVERS
from tests.serving import ROOT


@pytest.mark.parametrize("scope", [*(each for each in LONG if each not in ENGINES), *OTHER_SERVERS])
def test_modules_that_start_first_exist(scope: str) -> None:
    assert (ROOT / scope.partition(" ")[0]).is_file()
