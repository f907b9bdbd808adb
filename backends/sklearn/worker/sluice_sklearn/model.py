"""The model that the Python backend runs: one estimator."""

import importlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from .batch import answer
from .contract import complete, contract, refuse_no_estimator
from .estimator_file import EstimatorFile

WITHOUT_NAMES = "X does not have valid feature names"
"""The warning on rows without names, which clients cannot act on."""


class EstimatorModel:
    """Computes the requested outputs of an estimator."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Add inputs and outputs from the estimator."""
        complete(config, _loaded(config.as_dict()))
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the estimator and check the config; BadAnswer if either fails."""
        config = json.loads(args["model_config"])
        estimator = _loaded(config)
        limits = importlib.import_module("threadpoolctl").threadpool_limits
        self._limits = limits(share_of_cores(config, len(os.sched_getaffinity(0))))
        self._contract = contract(config, estimator)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """The responses, each with the requested outputs."""
        return answer(self._contract, requests)


def _loaded(config: Mapping[str, Any]) -> Any:
    estimator = EstimatorFile(config, Path(pb_utils.get_model_dir())).load()
    refuse_no_estimator(config["name"], estimator)
    warnings.filterwarnings("ignore", WITHOUT_NAMES)
    return estimator


def share_of_cores(config: Mapping[str, Any], cores: int) -> int:
    """The threads of one instance: the instances of a model share the cores."""
    groups = config.get("instance_group", ())
    instances = sum(max(1, int(each.get("count", 1))) for each in groups)
    return max(1, cores // max(1, instances))
