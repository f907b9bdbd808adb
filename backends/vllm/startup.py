"""How does a model become a running engine, and what is left behind if it does not?"""

import asyncio
import logging
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from multiprocessing.process import BaseProcess
from typing import Any

from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from backends.vllm.metrics import EngineMetrics
from backends.vllm.model_json import EngineModel, check_names

log = logging.getLogger("sluice.vllm")

CONTEXT = UsageContext.OPENAI_API_SERVER
"""It decides the default limits of a batch: those of a server."""


async def start_engine(model: EngineModel, metrics: EngineMetrics | None) -> Any:
    """A running AsyncLLM; the event loop stays free meanwhile.

    When it is cancelled, the processes started so far are killed first.
    """
    before = set(multiprocessing.active_children())
    with ThreadPoolExecutor(1, "vllm-startup") as thread:
        starting = asyncio.get_running_loop().run_in_executor(thread, _start, model, metrics)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await _abandon(starting, before)
            raise
