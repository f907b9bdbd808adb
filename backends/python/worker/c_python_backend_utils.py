"""The same under the name of Triton's native half, which some models import."""

from triton_python_backend_utils import *  # noqa: F403 - every name
