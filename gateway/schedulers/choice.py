"""Which scheduler does a configuration ask for?"""

from gateway.config import ModelConfig
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.direct import DirectScheduler
from gateway.schedulers.dynamic import DynamicScheduler
from gateway.schedulers.scheduler import Scheduler


def build_scheduler(config: ModelConfig, statistics: ModelStatistics) -> Scheduler:
    """The scheduler of one loaded version."""
    if config.dynamic_batching is not None:
        return DynamicScheduler(config, config.dynamic_batching, statistics)
    return DirectScheduler(statistics)
