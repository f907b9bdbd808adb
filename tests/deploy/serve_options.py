"""The options of `sluice serve` and `sluice replica`, as their help has them."""

import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache


@cache
def options(command: str) -> frozenset[str]:
    """Every option in the help of a command."""
    asked = [sys.executable, "-m", "gateway", command, "--help"]
    usage = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout
    return frozenset(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", usage)) - {"--help"}


def unknown(arguments: Iterable[str], command: str = "serve") -> list[str]:
    """The arguments that are not `--option=value` with an option of the command."""
    known = options(command)
    return [each for each in arguments if "=" not in each or each.split("=")[0] not in known]
