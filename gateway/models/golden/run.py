"""Golden requests of one load: their execution on each new instance, and the results."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path

from gateway.backend import Instance
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.models.golden.answer import GoldenAnswer
from gateway.models.golden.reading import GoldenRequest, read_golden
from gateway.models.golden.similarity import Find, cosine
from gateway.models.golden.tensor_checks import Mismatch
from gateway.models.golden.text_checks import Skipped
from gateway.models.golden_results import GoldenOutcome, GoldenResult
from gateway.models.instance_groups import InstanceSlot
from gateway.models.warmup import entry_of
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.execution import Execution
from gateway.settings import GoldenMode

log = logging.getLogger("sluice.golden")


class GoldenFailure(InferenceError):
    """The failure of a load by a golden request."""

    def again(self) -> "GoldenFailure":
        return GoldenFailure(self.code, self.message)


class GoldenRun:
    """The golden requests of one load of a version, and their results so far.

    In mode STRICT the first failure raises GoldenFailure; in mode WARN each is logged. `find` finds
    models that compare texts.
    """

    def __init__(self, model: str, version: int, mode: GoldenMode, find: Find) -> None:
        self._model, self._version = model, version
        self._mode = mode
        self._find = find
        self._requests: Sequence[GoldenRequest] = ()
        self.results: list[GoldenResult] = []

    def read(self, config: ModelConfig, folder: Path) -> bool:
        """Read the requests; whether there are any. Blocks; `folder` is the model's."""
        if self._mode is not GoldenMode.OFF:
            try:
                self._requests = read_golden(config, folder, self._version)
            except InferenceError as error:
                failed = GoldenResult(name="", outcome=GoldenOutcome.FAILED, reason=error.message)
                self.results.append(self._judged(failed, error.message))
        return bool(self._requests or self.results)

    async def check_woken(self, slot: InstanceSlot, instance: Instance) -> None:
        """Execute the first request on an instance that has napped; its result is not kept."""
        await self._run(self._check_first(slot, instance), slot, instance)

    async def check(self, slots: Sequence[InstanceSlot]) -> None:
        """Execute the requests, one after another, on each instance that takes requests.

        They count in no statistics of this model.
        """
        for slot in slots:
            if slot.instance is not None and not slot.passive:
                await self._run(self._check_all(slot, slot.instance), slot, slot.instance)
        log.info("golden requests checked", extra={**self._about, **self.counts})

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of results of each outcome."""
        found = dict.fromkeys(map(str, GoldenOutcome), 0)
        for each in self.results:
            found[each.outcome] += 1
        return found

    @property
    def _about(self) -> dict[str, object]:
        return {"model": self._model, "version": self._version}

    async def _run(
        self, checking: Coroutine[None, None, None], slot: InstanceSlot, instance: Instance
    ) -> None:
        await slot.closings.run(checking, lambda: [instance], self._model)

    async def _check_first(self, slot: InstanceSlot, instance: Instance) -> None:
        for first in self._requests[:1]:
            await self._asked(first, slot, instance)

    async def _check_all(self, slot: InstanceSlot, instance: Instance) -> None:
        for each in self._requests:
            self.results.append(await self._asked(each, slot, instance))

    async def _asked(
        self, golden: GoldenRequest, slot: InstanceSlot, instance: Instance
    ) -> GoldenResult:
        began = time.monotonic()
        outcome, reason = await self._outcome(golden, slot, instance)
        secs = time.monotonic() - began
        result = GoldenResult(
            name=golden.name, outcome=outcome, reason=reason, secs=secs, why=golden.why
        )
        return self._judged(result, f"golden request '{golden.name}': {reason}")

    async def _outcome(
        self, golden: GoldenRequest, slot: InstanceSlot, instance: Instance
    ) -> tuple[GoldenOutcome, str]:
        answer = GoldenAnswer()
        executing = _execute(instance, golden.request, answer)
        if not await slot.closings.run_within(golden.secs, executing, instance):
            return GoldenOutcome.FAILED, f"not answered within {golden.secs:g} s"
        try:
            await golden.expected.check(answer, partial(cosine, self._find))
        except Skipped as skipped:
            return GoldenOutcome.SKIPPED, str(skipped)
        except Mismatch as mismatch:
            return GoldenOutcome.FAILED, str(mismatch)
        return GoldenOutcome.PASSED, ""

    def _judged(self, result: GoldenResult, text: str) -> GoldenResult:
        if result.outcome is GoldenOutcome.PASSED:
            return result
        if result.outcome is GoldenOutcome.FAILED and self._mode is GoldenMode.STRICT:
            where = f"'{self._model}' version {self._version}"
            raise GoldenFailure(Code.INVALID_ARG, f"failed to load {where}: {text}")
        extra = {"request": result.name, "reason": result.reason}
        log.warning("golden request %s", result.outcome, extra=self._about | extra)
        return result


async def _execute(instance: Instance, request: InferRequest, answer: GoldenAnswer) -> None:
    statistics = ModelStatistics()
    entry = entry_of(request, statistics)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answer.read(entry.stream))
        await Execution(instance, [entry], statistics).run()
