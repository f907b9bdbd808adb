"""The program that serves a model of OpenVINO GenAI, as the Python backend runs it."""

from sluice_openvino_genai.model import OpenVinoGenAiModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
