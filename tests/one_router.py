"""The tests that `--fleet` has ask one of two routers, because its subject is a router's own."""

from collections.abc import Mapping
from types import MappingProxyType

import pytest

REGIONS = "shared memory that is registered at a router"
STATISTICS = "the statistics of a router"

ONE_ROUTER: Mapping[str, str] = MappingProxyType(
    {
        "conformance/test_access_log.py": "the lines of a router",
        "conformance/test_cache.py": "the response cache of a router",
        "conformance/test_descriptors.py": "the connections of a router",
        "conformance/test_early_refusals.py": "the limits of tenants at a router",
        "conformance/test_lifecycle.py": "the start and the end of a router",
        "conformance/test_management.py::"
        "test_statistics_count_batch_items_as_inferences_and_agree_with_metrics": STATISTICS,
        "conformance/test_metrics.py": STATISTICS,
        "conformance/test_policy_keys.py": "the refusals of keys at a router",
        "conformance/test_policy_tenants.py::test_a_cached_response_is_that_of_a_tenant": (
            "the response cache of a router"
        ),
        "conformance/test_policy_tenants.py::test_a_region_is_that_of_a_tenant": REGIONS,
        "conformance/test_receipts.py": "the accounts that a router keeps",
        "conformance/test_settings.py": "the settings of a router's log and traces",
        "conformance/test_shared_memory.py": REGIONS,
        "e2e/test_accounting.py::test_model_statistics_agree_with_the_metrics": STATISTICS,
        "e2e/test_shutdown.py": "the end of a router",
    }
)
"""The reasons by a module, or a module and the name of a test."""


def asks_one_router(item: pytest.Item) -> bool:
    """Whether the test or its module is in the table."""
    module = item.path.relative_to(item.config.rootpath).as_posix().removeprefix("tests/")
    name = item.name.partition("[")[0]
    return module in ONE_ROUTER or f"{module}::{name}" in ONE_ROUTER
