"""A stand-in for the library: its published signatures, and a model that repeats its prompt.

What the prompt says decides what happens: words of it begin with `!`. The engine writes what it was
asked for to the file that the variable STAND_IN_LOG names, one JSON text a line.
"""

from tensorrt_llm.llm import LLM
from tensorrt_llm.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]
