"""The model that the Python backend runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from sluice_llm.metrics import MetricFamilies, TokenLengths
from sluice_llm.program import EngineLoop, for_model, parameter
from sluice_llm.request import Mistake
from sluice_llm.running import ModelContract
from sluice_worker.work import worker

from .engine import cache_blocks, import_library, opened, processors, stage, tokens_of
from .loop import GenerationLoop
from .metrics import EngineGauges
from .model_file import DEFAULT, read_model_file
from .service import GenAiService

THREADS = "engine_threads"
"""The parameter with the number of CPUs that the gateway allows."""


class OpenVinoGenAiModel:
    """Accepts requests at once, and answers them as the engine makes tokens."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine; BadAnswer if that fails."""
        try:
            self._start(args)
        except Mistake as refusal:
            raise for_model(args["model_name"], refusal) from refusal.__cause__

    def execute(self, requests: Sequence[Any]) -> None:
        """Start the requests; they are answered later."""
        for request in requests:
            self._generations.arrived(request)

    def finalize(self) -> None:
        """Stop the loop; the process and the engine in it end afterwards."""
        self._loop.stop()
        self._service.close()

    def _start(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        name = config.get("default_model_filename") or DEFAULT
        folder = Path(pb_utils.get_model_dir())
        file = read_model_file(folder, name, args.get("stored_model", ""))
        with stage("library imported"):
            library = import_library()
        threads = int(parameter(config, THREADS) or processors())
        pipeline = opened(library, file, threads)
        tokens = tokens_of(pipeline)
        blocks = cache_blocks(library, pipeline, tokens.end)
        metrics = MetricFamilies(args["model_name"], args["model_version"])
        most = file.scheduler["max_num_seqs"]
        gauges = EngineGauges(metrics, blocks, most)
        self._generations = GenerationLoop(pipeline, gauges, TokenLengths(metrics), most)
        contract = ModelContract(
            model=config["name"], decoupled=True, batched=False, max_length=file.max_length
        )
        self._service = GenAiService(library, pipeline, tokens, contract, blocks, self._generations)
        pb_utils.Logger.log_info(
            f"cache blocks={blocks} tokens={blocks * 32} threads={threads} "
            f"text={'bytes' if tokens.by_bytes else 'decoded'}"
        )
        worker().work.watch()
        self._loop = EngineLoop()
        self._loop.start(self._generations.run(self._service.accept))
