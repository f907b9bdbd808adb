"""What does a freshly loaded instance execute before it is ready?"""

import logging
from pathlib import Path

from gateway.backend import Instance
from gateway.config import ModelConfig

log = logging.getLogger("sluice.warmup")


async def warm_up(instance: Instance, config: ModelConfig, folder: Path) -> None:
    """Execute the warm-up requests of the config; `folder` is the model's, with its `warmup/`.

    This release executes none, as the verdict on `model_warmup` says.
    """
    if config.model_warmup:
        log.warning("warm-up requests are not executed", extra={"model": config.name})
