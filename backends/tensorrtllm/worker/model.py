"""The program that serves a model of TensorRT-LLM, as the Python backend runs it."""

from sluice_tensorrtllm.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
