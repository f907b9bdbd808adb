"""The library, without its reports: sessions would send events to its makers."""

import os
from importlib import import_module
from typing import Any

# The library reads this when it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

onnxruntime: Any = import_module("onnxruntime")
state: Any = import_module("onnxruntime.capi.onnxruntime_pybind11_state")
