"""The program that serves a model of OpenVINO GenAI, as the Python backend runs it."""

from sluice_openvino_genai.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
