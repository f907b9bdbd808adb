"""Distribution of test modules among the processes of pytest-xdist."""

import re
from functools import cache

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.serving import ROOT

STARTS_ENGINES = re.compile(r"\bmark\.vllm\b|\bengine_marks\b")
KIND = re.compile(r"[\[-](@\w+)")
"""The kind of a server among the parameters of a test; `tests/conftest.py` has them all."""
E2E = "tests/e2e/"
SHARED = ("tests/gateway/storage/unpacking/", "tests/backends/pytorch/", E2E)
"""Folders whose modules share what takes long to make or to import."""
ENGINES = ("engines of servers", "engines", "engines of other servers")
OTHER_SERVERS = tuple(
    f"{E2E}test_{name}.py"
    for name in (
        *("compilers", "engine_death", "killed_replicas", "real_model", "reasoning"),
        "start_stages",
    )
)
"""Modules that do not use the servers of the others of their folder."""
LONG = (
    *ENGINES,
    "tests/backends/python/test_environments_requirements.py",
    "tests/conformance/test_config_fields.py",
    "tests/conformance/test_python_backend.py",
    "tests/conformance/test_http_time_limits.py",
    "tests/conformance/test_python_environments.py",
    "tests/gateway/processes/test_supervisor.py",
    "tests/gateway/frontends/http/playground/test_state_view.py",
    "tests/sweep/test_stops.py",
    "tests/gateway/test_random.py @frontends",
    "tests/gateway/test_random.py @grpcio",
    "tests/gateway/test_random.py",
)
"""These start first, the longest foremost: they have few tests, each of which takes seconds."""


class ModuleScheduling(LoadScopeScheduling):
    """Each process takes one module and one kind of servers at a time, long ones first.

    Modules that start engines stay in two processes, since they share engines: those whose engines
    belong to servers in one, those whose engines belong to the tests in the other. The process that
    is free first also takes those with servers of their own.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        self.workqueue.move_to_end(min(self.workqueue, key=self._rank), last=False)
        super()._assign_work_unit(node)

    def _rank(self, scope: str) -> tuple[int, int]:
        place = LONG.index(scope) if scope in LONG else len(LONG)
        return place, -len(self.workqueue[scope])

    def _split_scope(self, nodeid: str) -> str:
        module, _, name = nodeid.partition("::")
        if _starts_engines(module):
            return ENGINES[2 if module in OTHER_SERVERS else not module.startswith(E2E)]
        kind = KIND.search(name)
        shared = next((folder for folder in SHARED if module.startswith(folder)), module)
        return f"{shared} {kind[1]}" if kind else shared


@cache
def _starts_engines(module: str) -> bool:
    return bool(STARTS_ENGINES.search((ROOT / module).read_text()))
