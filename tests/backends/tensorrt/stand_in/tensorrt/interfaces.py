"""Classes of the library that its users derive from."""

from typing import Any

from .enums import Severity as _Severity


class ILogger:
    """A derived class must call this constructor, as the library's must."""

    Severity = _Severity
    made = False

    def __init__(self) -> None:
        self.made = True

    def log(self, severity: _Severity, msg: str) -> None:
        raise NotImplementedError


class IOutputAllocator:
    made = False

    def __init__(self) -> None:
        self.made = True

    def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
        raise NotImplementedError

    def reallocate_output_async(
        self, tensor_name: str, memory: int, size: int, alignment: int, stream: int
    ) -> int:
        raise NotImplementedError

    def notify_shape(self, tensor_name: str, shape: Any) -> None:
        raise NotImplementedError


class Logging:
    """The logger that the library was given."""

    def __init__(self, logger: ILogger) -> None:
        if not isinstance(logger, ILogger) or not logger.made:
            raise TypeError("__init__(): incompatible constructor arguments: no ILogger")
        self._logger = logger

    def error(self, text: str) -> bool:
        """Say why something is not done; always False."""
        self._logger.log(_Severity.ERROR, text)
        return False

    def warning(self, text: str) -> None:
        self._logger.log(_Severity.WARNING, text)
