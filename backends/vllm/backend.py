"""The backend `vllm`: LLMs behind Triton's vLLM contract."""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from backends.vllm.ray_workers import SETTING
from backends.vllm.settings import EngineModel, read_engine_model
from gateway.backend import Backend, Fact, Instance, ModelContext
from gateway.config import (
    InstanceGroup,
    InstanceKind,
    ModelConfig,
    TransactionPolicy,
)
from gateway.errors import Code, InferenceError
from gateway.generation import INPUTS, OUTPUTS
from gateway.threads import apart

log = logging.getLogger("sluice.vllm")

Open = Callable[[EngineModel, Callable[[int], None]], Awaitable[Instance]]

FRONTENDS = "frontends"
"""The backend setting with the number of frontend processes."""


class VllmBackend(Backend):
    """Starts one vLLM engine per instance, one at a time, each in its own processes."""

    def __init__(self) -> None:
        self._open, self._open_shared = _import_vllm()
        self._starting = asyncio.Lock()

    @property
    def facts(self) -> Sequence[Fact]:
        """Whether Torch can compile, and the data type of models whose `model.json` names none."""
        from backends.vllm.machine import facts

        return facts()

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        """Add the missing inputs and outputs of the contract; the model is decoupled."""
        _require_one_instance(config)
        inputs = {each.name for each in config.input}
        outputs = {each.name for each in config.output}
        group = InstanceGroup(kind=InstanceKind.KIND_MODEL, count=1)
        return replace(
            config,
            max_batch_size=0,
            input=(*config.input, *(i for i in INPUTS if i.name not in inputs)),
            output=(*config.output, *(o for o in OUTPUTS if o.name not in outputs)),
            model_transaction_policy=TransactionPolicy(decoupled=True),
            instance_group=config.instance_group or (group,),
        )

    async def load(self, context: ModelContext) -> Instance:
        name = context.config.name
        if not context.config.decoupled:
            raise InferenceError(
                Code.INVALID_ARG,
                f"model '{name}': vLLM models must have a decoupled transaction policy",
            )
        clients = max(1, int(self.settings.get(FRONTENDS, "1")))
        model = await apart(read_engine_model, context, clients)
        model = replace(model, placement_group=self.settings.get(SETTING, ""))
        log.info("model.json read", extra=model.log_fields)
        # vLLM measures free memory while it starts; a concurrent start would falsify that.
        async with self._starting:
            opened = self._open if model.clients == 1 else self._open_shared
            return await opened(model, context.wasted)


def _require_one_instance(config: ModelConfig) -> None:
    count = sum(group.count for group in config.instance_group)
    if count > 1:
        raise InferenceError(
            Code.INVALID_ARG,
            f"model '{config.name}': its instance groups ask for {count} instances, expected 1: an "
            "engine of vLLM serves any number of requests at once",
        )


def _import_vllm() -> tuple[Open, Open]:
    """Import the parts that need vLLM, whose first import takes seconds.

    Returns the function that opens an engine whose client is this process, and the one for an
    engine with several client processes.
    """
    if "vllm" not in sys.modules:
        log.info("import of vllm started")
        if not log.isEnabledFor(logging.DEBUG):
            logging.getLogger("vllm").setLevel(logging.WARNING)
    from backends.vllm.engine_clients.instance import open_shared
    from backends.vllm.opening import open_instance

    return open_instance, open_shared
