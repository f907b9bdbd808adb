"""Ensembles as a backend: its instance calls other models."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from gateway.backend import Answer, Backend, Instance, ModelContext
from gateway.config import ModelConfig, TransactionPolicy
from gateway.ensembles.checks import check_wiring
from gateway.ensembles.graph import Members
from gateway.ensembles.run import EnsembleRun
from gateway.ensembles.steps import LoadedEnsemble
from gateway.errors import InferenceError
from gateway.messages import InferRequest


class EnsembleBackend(Backend):
    """The backend of one ensemble, with the currently loaded members."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        """Check the members; the ensemble is decoupled if any member is."""
        configs = {key: member.config for key, member in self._members.items()}
        decoupled = check_wiring(config, configs)
        return replace(config, model_transaction_policy=TransactionPolicy(decoupled=decoupled))

    async def load(self, context: ModelContext) -> Instance:
        return EnsembleInstance(context.config, self._members)


class EnsembleInstance(Instance):
    """Holds its members until it is closed, also if they are replaced meanwhile.

    A request ends with the versions with which it began.
    """

    concurrency = None

    def __init__(self, config: ModelConfig, members: Members) -> None:
        self._name = config.name
        self._ensemble = LoadedEnsemble(config, members)
        self._members = list(members.values())
        self._runs: set[EnsembleRun] = set()
        for member in self._members:
            member.hold()

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        for index, request in enumerate(requests):
            run = EnsembleRun(self._ensemble, request)
            self._runs.add(run)
            try:
                run.begin()
                while True:
                    for response in run.work():
                        yield index, response
                    if run.over:
                        break
                    await run.change()
            except InferenceError as error:
                run.cancel()
                failed = error.within(f"in ensemble '{self._name}', ")
                failed.dead_instance = error.dead_instance
                failed.lacks_instance = error.lacks_instance and run.calls == 1
                failed.of_step = True
                failed.after_steps = error.after_steps or run.calls > 1
                yield index, failed
            finally:
                run.cancel()
                self._runs.discard(run)

    @property
    def waits_for(self) -> Iterable[str]:
        return [model for run in self._runs for model in run.waits_for]

    def members_of(self, requests: Sequence[InferRequest]) -> Iterable[str]:
        """The models that these of its requests wait for."""
        runs = [run for run in self._runs if any(run.request is each for each in requests)]
        return [model for run in runs for model in run.waits_for]

    async def close(self) -> None:
        while self._members:
            self._members.pop().release()
