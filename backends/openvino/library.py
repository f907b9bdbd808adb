"""The library, without its reports: its import would send an event to its makers."""

import sys
from importlib import import_module
from typing import Any

# The library does without this package.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

openvino: Any = import_module("openvino")
PrePostProcessor: Any = import_module("openvino.preprocess").PrePostProcessor
