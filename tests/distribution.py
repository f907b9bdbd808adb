"""Distribution of test modules among the processes of pytest-xdist."""

from functools import cache

from xdist.scheduler import LoadScopeScheduling

from tests.serving import ROOT

STARTS_ENGINES = "mark.vllm"


class ModuleScheduling(LoadScopeScheduling):
    """Each process takes one module at a time; modules that start engines stay in one process.

    An engine takes a gigabyte and every core while it starts, and modules share engines.
    """

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return "engines" if _starts_engines(module) else module


@cache
def _starts_engines(module: str) -> bool:
    return STARTS_ENGINES in (ROOT / module).read_text()
