"""Which model is meant, where several repositories may have models of one name?"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class ModelId:
    """A model's name, and its repository's path if names are only unique within one."""

    name: str
    namespace: str = ""

    def __str__(self) -> str:
        return f"{self.namespace}::{self.name}" if self.namespace else self.name
