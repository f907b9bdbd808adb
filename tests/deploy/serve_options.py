"""The options of `sluice serve`, as its help has them."""

import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache


@cache
def options() -> frozenset[str]:
    """Every option in the help."""
    command = [sys.executable, "-m", "gateway", "serve", "--help"]
    usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    return frozenset(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", usage)) - {"--help"}


def unknown(arguments: Iterable[str]) -> list[str]:
    """The arguments that are not `--option=value` with an option of `sluice serve`."""
    return [each for each in arguments if "=" not in each or each.split("=")[0] not in options()]
