"""The enumerations of `tensorrt` whose members the backend names."""

from enum import Enum


class Severity(Enum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class DataType(Enum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8
    INT4 = 9
    FP4 = 10
    E8M0 = 11


class TensorIOMode(Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(Enum):
    DEVICE = 0
    HOST = 1


class TensorFormat(Enum):
    LINEAR = 0
    CHW4 = 3


class ExecutionContextAllocationStrategy(Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2
