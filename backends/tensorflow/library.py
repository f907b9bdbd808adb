"""TensorFlow, imported once for all models, and its failures."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from google.protobuf.message import DecodeError
from google.protobuf.text_format import ParseError

from gateway.tensor_runtime.failures import ClearFailures


@contextmanager
def _variables(**wanted: str) -> Iterator[None]:
    """Variables of the environment that are not set yet; processes started later lack them."""
    added = {name: each for name, each in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


# TensorFlow reads both once: the level of its log at its import, and the other at its first
# session. Without it the first session sets the threads of all.
with _variables(TF_CPP_MIN_LOG_LEVEL="2", TF_OVERRIDE_GLOBAL_THREADPOOL="1"):
    import tensorflow.compat.v1 as tf
    from tensorflow.core.framework.types_pb2 import DataType as TensorFlowType
    from tensorflow.core.protobuf.config_pb2 import CallableOptions
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    tf.Session(graph=tf.Graph(), config=tf.ConfigProto(device_count={"GPU": 0})).close()

# Its functions for sessions are deprecated, and a warning says so at each load.
tf.get_logger().setLevel("ERROR")

__all__ = ["CallableOptions", "SavedModel", "TensorFlowType", "clear_failures", "tf"]

ERRORS = (
    tf.errors.OpError,
    DecodeError,
    ParseError,
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
    MemoryError,
    OSError,
)
"""The library raises OpError, its bindings and its readers also others."""

NOISE = re.compile(
    r"Graph execution error:.*\nNode: '[^'\n]*'\n|\n\nOriginal stack trace.*"
    r"|\s*\[\[\{\{node [^\]]*\]\]| in binary running on \S+?(?=\.? )",
    re.DOTALL,
)
"""Places in Python sources where a model was made, marks of nodes, and the host's name."""


def clear_failures(folder: Path, what: str) -> ClearFailures:
    """A context for calls of the library; `what` begins the text of a failure."""
    return ClearFailures(folder, what, ERRORS, _reason)


def _reason(text: str) -> str:
    """The library's reason; KeyError puts its text into quotation marks."""
    reason = NOISE.sub("", text)
    return reason[1:-1] if reason[:1] == reason[-1:] == '"' else reason
