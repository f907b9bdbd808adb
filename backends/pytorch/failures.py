"""Failures of PyTorch, in one line for clients."""

import pickle
import re
import struct
import zipfile
import zlib

import torch

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError

FAILURES = (
    RuntimeError,
    torch.jit.Error,
    ValueError,
    TypeError,
    LookupError,
    AssertionError,
    ArithmeticError,
    AttributeError,
    MemoryError,
    OSError,
    EOFError,
    ImportError,
    SyntaxError,
    pickle.PickleError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""Exceptions of loading or running a model, whose code is foreign."""

LONGEST = 1000

_STACK = re.compile(r"\n(?:Exception raised from|frame #\d+:|C\+\+ CapturedTraceback)")
_RAISED = re.compile(r"^(?:[\w.]*\.)?\w*(?:Error|Exception)\w*: ", re.MULTILINE)
_PATH = re.compile(r"(?<![\w.])(?:/[^\s/:'\"]+)+/([^\s/:'\"]+)")


def reason(error: BaseException) -> str:
    """The reason of an error, without traceback, C++ stack and folders of paths."""
    text = _STACK.split(str(error), maxsplit=1)[0]
    if "Traceback of TorchScript" in text:
        text = _raised(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    shown = "; ".join(lines[:3]) or type(error).__name__
    return _PATH.sub(r"\1", shown)[:LONGEST]


def _raised(text: str) -> str:
    """The text after TorchScript's traceback, which ends with `<name of the error>: <text>`."""
    found = list(_RAISED.finditer(text))
    return text[found[-1].end() :] if found else text.strip().splitlines()[-1]


def load_failure(config: ModelConfig, error: BaseException) -> InferenceError:
    """The error of a file that PyTorch refuses, in Triton's words."""
    return InferenceError(Code.INTERNAL, f"failed to load model '{config.name}': {reason(error)}")
