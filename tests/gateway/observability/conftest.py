"""Statistics of a model, and the record of one request."""

import pytest

from gateway.observability.request_record import Record
from gateway.observability.statistics import ModelStatistics


@pytest.fixture
def statistics() -> ModelStatistics:
    return ModelStatistics()


@pytest.fixture
def record(statistics: ModelStatistics) -> Record:
    return Record(statistics, 1, 0, lambda _: None)
