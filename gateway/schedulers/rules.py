"""How does each instance of a model form its batches?"""

import logging
from collections.abc import Sequence

from gateway.backend import Instance
from gateway.batches.padding import Padding
from gateway.config import ModelConfig
from gateway.config.scheduling import DynamicBatching
from gateway.schedulers.batching import Batching, FirstComeBatching
from gateway.schedulers.calibration import measure
from gateway.schedulers.costs import DEFAULT_BUDGET, Cost, Point
from gateway.schedulers.length_batching import LengthBatching

log = logging.getLogger("sluice.batching")


class BatchRules:
    """The rules of a model, with what is known of each of its instances.

    Raises InferenceError INVALID_ARG if the config's padding cannot be.
    """

    def __init__(self, config: ModelConfig, batching: DynamicBatching) -> None:
        self.padding = Padding.read(config)
        self._config = config
        self._batching = batching
        self._measured: dict[Instance, Batching] = {}
        self._usual = self._by_length(Cost.assumed(self.padding.token_budget or DEFAULT_BUDGET))
        if not self.padding.inputs:
            self._usual = FirstComeBatching(config, batching)

    def of(self, instance: Instance) -> Batching:
        """The rules for an instance."""
        return self._measured.get(instance, self._usual)

    async def prepare(self, instance: Instance) -> None:
        """Measure the instance, if batches are formed by length and no budget is given."""
        if self.padding.inputs and not self.padding.token_budget:
            points = await measure(instance, self._config, self.padding)
            cost = Cost.measured(points)
            self._measured[instance] = self._by_length(cost)
            self._tell(cost, points)

    def forget(self, instance: Instance) -> None:
        """The instance has died."""
        self._measured.pop(instance, None)

    def _by_length(self, cost: Cost) -> Batching:
        return LengthBatching(self._config, self._batching, cost)

    def _tell(self, cost: Cost, points: Sequence[Point]) -> None:
        log.info(
            "batches measured",
            extra={
                "model": self._config.name,
                "token_budget": cost.budget,
                "overhead_tokens": round(cost.overhead),
                "tokens_per_second": {each.tokens: round(each.rate) for each in points},
            },
        )
