"""The backend `tensorflow`: SavedModels and GraphDefs by TensorFlow, on CPUs."""

import threading
from pathlib import Path
from weakref import WeakValueDictionary

from backends.tensorflow.batching import batches
from backends.tensorflow.instance import TensorFlowInstance
from backends.tensorflow.model_file import ModelFile, is_graph_def, read_model
from backends.tensorflow.parameters import TensorFlowParameters
from backends.tensorflow.session import SharedSession, open_session
from gateway.backend import Backend, Description, Instance, ModelContext
from gateway.config import InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.checks import CheckRules, check
from gateway.tensor_runtime.completion import (
    DEFAULT_BATCH_SIZE,
    USUAL_BATCH_SIZE,
    ListedTensors,
    complete,
)
from gateway.tensor_runtime.model_files import file_stamps
from gateway.tensor_runtime.parameters import count
from gateway.threads import apart

SAVED_MODEL_RULES = CheckRules(exact_outputs=True, free_ranks=True)
GRAPH_DEF_RULES = CheckRules(spare_inputs=True, free_ranks=True)


class TensorFlowBackend(Backend):
    """Instances have sessions of their own, or share them by MAX_SESSION_SHARE_COUNT."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: WeakValueDictionary[tuple[object, ...], SharedSession] = WeakValueDictionary()

    @property
    def computes_on_gpus(self) -> bool:
        """Sessions are opened without GPUs."""
        return False

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        if is_graph_def(config):  # its nodes do not say which of them are inputs and outputs
            return config
        return self._completed(config, path, ListedTensors.FILLED)

    def describe(self, config: ModelConfig, path: Path) -> Description:
        return Description(self._completed(config, path, ListedTensors.KEPT))

    def _completed(self, config: ModelConfig, path: Path, listed: ListedTensors) -> ModelConfig:
        parameters = TensorFlowParameters.read(config, self.settings)
        signature = read_model(config, path, parameters).signature
        size = count(self.settings, DEFAULT_BATCH_SIZE, USUAL_BATCH_SIZE)
        return complete(config, signature, size if batches(config, signature) else None, listed)

    async def load(self, context: ModelContext) -> Instance:
        if context.group.kind is InstanceKind.KIND_GPU:
            raise InferenceError(
                Code.UNSUPPORTED,
                f"unable to load model '{context.config.name}', TensorFlow models run on CPUs: "
                "found KIND_GPU, expected KIND_CPU or KIND_MODEL",
            )
        return await apart(self._load, context, discard=TensorFlowInstance.discard)

    def _load(self, context: ModelContext) -> TensorFlowInstance:
        config, folder = context.config, context.path
        parameters = TensorFlowParameters.read(config, self.settings)
        file = read_model(config, folder, parameters)
        rules = SAVED_MODEL_RULES if file.graph_def is None else GRAPH_DEF_RULES
        check(config, file.signature, rules)
        session = self._session(context, file, parameters)
        try:
            return TensorFlowInstance(context, session, file.signature)
        except BaseException:
            session.leave()
            raise

    def _session(
        self, context: ModelContext, file: ModelFile, parameters: TensorFlowParameters
    ) -> SharedSession:
        """A session with the instance as its user."""
        config, folder = context.config, context.path
        if parameters.share_count == 1:
            session = open_session(config, folder, file, parameters)
            session.joined(1)
            return session
        key = (folder, file_stamps(folder), repr(config))
        with self._lock:
            known = self._shared.get(key)
            if known is not None and known.joined(parameters.share_count):
                return known
            session = open_session(config, folder, file, parameters)
            session.joined(parameters.share_count)
            self._shared[key] = session
            return session
