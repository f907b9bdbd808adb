"""Distribution of test modules among the processes of pytest-xdist."""

import re
from functools import cache

from xdist.scheduler import LoadScopeScheduling

from tests.serving import ROOT

STARTS_ENGINES = re.compile(r"\bmark\.vllm\b|\bengine_marks\b")
KIND = re.compile(r"[\[-](@\w+)")
"""The kind of a server among the parameters of a test; `tests/conftest.py` has them all."""
SHARED = ("tests/gateway/storage/unpacking/",)
"""Folders whose modules share what takes long to make."""


class ModuleScheduling(LoadScopeScheduling):
    """Each process takes one module and one kind of servers at a time.

    Modules that start engines stay in one process: an engine takes a gigabyte and every core while
    it starts, and modules share engines.
    """

    def _split_scope(self, nodeid: str) -> str:
        module, _, name = nodeid.partition("::")
        if _starts_engines(module):
            return "engines"
        kind = KIND.search(name)
        shared = next((folder for folder in SHARED if module.startswith(folder)), module)
        return f"{shared} {kind[1]}" if kind else shared


@cache
def _starts_engines(module: str) -> bool:
    return bool(STARTS_ENGINES.search((ROOT / module).read_text()))
