"""The backend `fil`: forests on CPUs, each by one library."""

from pathlib import Path

from backends.fil.answers import Answers, check_forest, signature
from backends.fil.instance import FilInstance
from backends.fil.model_file import read_forest
from backends.fil.parameters import FilParameters, warn_of_removed
from gateway.backend import Backend, Instance, ModelContext
from gateway.config import InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.completion import DEFAULT_BATCH_SIZE, complete, is_complete
from gateway.tensor_runtime.parameters import count
from gateway.threads import apart

USUAL_BATCH_SIZE = 32768


class FilBackend(Backend):
    """Reads a file with XGBoost, LightGBM or treelite."""

    @property
    def computes_on_gpus(self) -> bool:
        return False

    async def prepare(self, config: ModelConfig, path: Path) -> None:
        """Check the parameters, and log those without effect once for all instances."""
        FilParameters.read(config)
        warn_of_removed(config)

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        if is_complete(config):
            return config
        forest = read_forest(config, path, FilParameters.read(config).threads)
        size = count(self.settings, DEFAULT_BATCH_SIZE, USUAL_BATCH_SIZE)
        return complete(config, signature(forest, Answers.of(forest, config), config), size)

    async def load(self, context: ModelContext) -> Instance:
        if context.group.kind is not InstanceKind.KIND_CPU:
            raise InferenceError(
                Code.INVALID_ARG,
                f"unable to load model '{context.config.name}', instances of "
                f"{context.group.kind.name} are not supported by backend fil, which computes on "
                "CPUs; use KIND_CPU or KIND_AUTO",
            )
        return await apart(_load, context, discard=FilInstance.discard)


def _load(context: ModelContext) -> FilInstance:
    config = context.config
    forest = read_forest(config, context.path, FilParameters.read(config).threads)
    answers = Answers.of(forest, config)
    check_forest(forest, answers, config)
    return FilInstance(context, forest, answers)
