"""Commands of modules that a process starts as processes of its own, with its search path."""

import os
import sys


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command of a module; `-P` keeps the working directory from the head of its path."""
    return (sys.executable, "-P", "-m", module, *arguments)


def module_environment(**variables: str) -> dict[str, str]:
    """The environment for such a command: this process's own, with its search path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
