"""The configuration picks the scheduler."""

from gateway.models.model import build_scheduler
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.dynamic import DynamicScheduler
from gateway.schedulers.scheduler import DirectScheduler
from tests.builders import TEXT
from tests.gateway.schedulers.queues import dynamic


def test_requests_are_batched_only_if_configured() -> None:
    assert isinstance(build_scheduler(TEXT, ModelStatistics()), DirectScheduler)
    assert isinstance(build_scheduler(dynamic(), ModelStatistics()), DynamicScheduler)
