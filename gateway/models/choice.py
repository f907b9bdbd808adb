"""Which scheduler does a configuration ask for?"""

from pathlib import Path

from gateway.config import ModelConfig
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.direct import DirectScheduler
from gateway.schedulers.dynamic import DynamicScheduler
from gateway.schedulers.scheduler import Scheduler
from gateway.sequences.scheduler import SequenceScheduler


def build_scheduler(
    config: ModelConfig, statistics: ModelStatistics, folder: Path = Path()
) -> Scheduler:
    """The scheduler of one loaded version; `folder` is the model's."""
    if config.dynamic_batching is not None:
        return DynamicScheduler(config, config.dynamic_batching, statistics)
    if config.sequence_batching is not None:
        return SequenceScheduler(config, config.sequence_batching, statistics, folder)
    return DirectScheduler(statistics)
