"""The model that the Python backend runs, and the event loop of its engine."""

import asyncio
import json
import threading
import traceback
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from sluice_worker.errors import BadAnswer

from .chat import load_parsers
from .engine import choose_gpu, import_library, opened
from .metrics import TrtLlmMetrics
from .model_file import AdapterRequests, LlmModelFile, read_model_file
from .request import Refusal
from .service import AbortWatch, ModelContract, RequestService


class EngineLoop:
    """The event loop of the engine's requests: a thread for the life of the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[Future[Any]] = set()
        threading.Thread(target=self._loop.run_forever, name="engine-loop", daemon=True).start()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run it concurrently; its exception is logged."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._tasks.add(future)
        future.add_done_callback(self._ended)

    def stop(self) -> None:
        """Stop the loop; unfinished coroutines stay suspended."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _ended(self, future: "Future[Any]") -> None:
        self._tasks.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            pb_utils.Logger.log_error("".join(traceback.format_exception(error)))


class TritonPythonModel:
    """Accepts requests at once, and answers them as the engine makes tokens."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Add the batch size and the transaction policy of the model's file."""
        known = config.as_dict()
        try:
            file = read_model_file(Path(pb_utils.get_model_dir()), _stored(known))
        except Refusal as refusal:
            raise _for_model(known["name"], refusal) from None
        if "model_transaction_policy" not in known:
            config.set_model_transaction_policy({"decoupled": file.decoupled is not False})
        if file.max_batch_size and not known.get("max_batch_size"):
            config.set_max_batch_size(file.max_batch_size)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine, which may take minutes; BadAnswer if that fails."""
        try:
            self._start(args)
        except Refusal as refusal:
            raise _for_model(args["model_name"], refusal) from refusal.__cause__

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
        metrics = TrtLlmMetrics(args["model_name"], args["model_version"])
        self._service = RequestService(
            self._llm,
            library,
            contract,
            AdapterRequests(file, library.LoRARequest),
            AbortWatch(file.check_secs),
            metrics,
        )
        if file.arguments.get("enable_iter_perf_stats", True):
            self._loop.start(metrics.follow(self._llm))


def _contract(config: dict[str, Any], file: LlmModelFile) -> ModelContract:
    length = file.arguments.get("max_seq_len")
    thoughts = _parameter(config, "reasoning_parser") or file.arguments.get("reasoning_parser")
    return ModelContract(
        model=config["name"],
        decoupled=bool((config.get("model_transaction_policy") or {}).get("decoupled")),
        batched=bool(config.get("max_batch_size")),
        max_length=length if isinstance(length, int) else None,
        parsers=load_parsers(str(thoughts or ""), _parameter(config, "tool_call_parser")),
    )


def _stored(config: dict[str, Any]) -> str:
    """The name of the stored model, in place of its folder."""
    return _parameter(config, "stored_model")


def _parameter(config: dict[str, Any], name: str) -> str:
    return str(config.get("parameters", {}).get(name, {}).get("string_value", ""))


def _for_model(name: str, refusal: Refusal) -> BadAnswer:
    """The error that the gateway reports unchanged."""
    return BadAnswer(f"model '{name}': {refusal}")
