"""The model that the Python backend runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from sluice_llm.metrics import MetricFamilies, TokenLengths
from sluice_llm.program import EngineLoop, for_model, parameter
from sluice_llm.request import Mistake
from sluice_llm.running import AbortWatch, ModelContract

from .engine import choose_gpu, import_library, opened
from .metrics import TrtLlmMetrics
from .model_file import AdapterRequests, LlmModelFile, read_model_file
from .parsers import load_parsers
from .service import RequestService


class TritonPythonModel:
    """Accepts requests at once, and answers them as the engine makes tokens."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Add the batch size and the transaction policy of the model's file."""
        known = config.as_dict()
        try:
            file = read_model_file(Path(pb_utils.get_model_dir()), _stored(known))
        except Mistake as refusal:
            raise for_model(known["name"], refusal) from None
        if "model_transaction_policy" not in known:
            config.set_model_transaction_policy({"decoupled": file.decoupled is not False})
        if file.max_batch_size and not known.get("max_batch_size"):
            config.set_max_batch_size(file.max_batch_size)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine, which may take minutes; BadAnswer if that fails."""
        try:
            self._start(args)
        except Mistake as refusal:
            raise for_model(args["model_name"], refusal) from refusal.__cause__

    def execute(self, requests: Sequence[Any]) -> None:
        """Start the requests; they are answered later."""
        for request in requests:
            self._loop.start(self._service.answer(request))

    def finalize(self) -> None:
        """Shut down the engine and its processes."""
        self._loop.stop()
        self._llm.shutdown()

    def _start(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        file = read_model_file(Path(pb_utils.get_model_dir()), args.get("stored_model", ""))
        choose_gpu(args, file)
        llm, library = import_library()
        contract = _contract(config, file)
        self._llm = opened(llm, file)
        self._loop = EngineLoop()
        metrics = MetricFamilies(args["model_name"], args["model_version"])
        self._service = RequestService(
            self._llm,
            library,
            contract,
            AdapterRequests(file, library.LoRARequest),
            AbortWatch(file.check_secs),
            TokenLengths(metrics),
        )
        gauges = TrtLlmMetrics(metrics)
        if file.arguments.get("enable_iter_perf_stats", True):
            self._loop.start(gauges.follow(self._llm))


def _contract(config: dict[str, Any], file: LlmModelFile) -> ModelContract:
    length = file.arguments.get("max_seq_len")
    thoughts = parameter(config, "reasoning_parser") or file.arguments.get("reasoning_parser")
    return ModelContract(
        model=config["name"],
        decoupled=bool((config.get("model_transaction_policy") or {}).get("decoupled")),
        batched=bool(config.get("max_batch_size")),
        max_length=length if isinstance(length, int) else None,
        parsers=load_parsers(str(thoughts or ""), parameter(config, "tool_call_parser")),
    )


def _stored(config: dict[str, Any]) -> str:
    """The name of the stored model, in place of its folder."""
    return str(parameter(config, "stored_model"))
