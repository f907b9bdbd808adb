"""Repository agents: the agent `checksum` compares files of a model with their hashes at each load.

Triton's other agents are libraries and refused by name.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.models.model_folder import leaves_folder

CHECKSUM = "checksum"
ALGORITHMS = {"md5": "MD5", "sha256": "SHA256"}
"""Algorithms by their names in a config in lower case. Triton has MD5 only."""


@dataclass(frozen=True, slots=True)
class FileChecksum:
    """The hash that a file of the model's folder must have, in hexadecimal digits."""

    algorithm: str
    file: str
    expected: str

    def verify(self, folder: Path) -> None:
        """Raise INVALID_ARG, with Triton's texts, if the file has another hash or is unreadable.

        Blocks for the time of reading the file.
        """
        try:
            with (folder / self.file).open("rb") as file:
                found = hashlib.file_digest(file, self._digest).hexdigest()
        except OSError as error:
            raise InferenceError(
                Code.INVALID_ARG,
                f"failed to open text file for read {self.file}: {error.strerror}",
            ) from None
        if found != self.expected.lower():
            raise InferenceError(
                Code.INVALID_ARG,
                f"Mismatched {ALGORITHMS[self.algorithm]} hash for file {self.file}, expect: "
                f"{self.expected}, got: {found}",
            )

    def _digest(self) -> "hashlib._Hash":
        # A hash of files, which the rules of FIPS for security do not concern.
        return hashlib.new(self.algorithm, usedforsecurity=False)


def checksums(config: ModelConfig) -> list[FileChecksum]:
    """The hashes that the agents of a config demand, in order.

    Raises InferenceError: UNSUPPORTED for another agent or algorithm, INVALID_ARG for a key without
    an algorithm, or for a path outside of the model's folder.
    """
    agents = config.model_repository_agents.agents if config.model_repository_agents else ()
    for agent in agents:
        if agent.name != CHECKSUM:
            raise InferenceError(
                Code.UNSUPPORTED,
                f"repository agent '{agent.name}' of model '{config.name}' is not supported; "
                f"expected '{CHECKSUM}', the only one without a library of Triton's",
            )
    return [
        _checksum(key, expected, config.name)
        for agent in agents
        for key, expected in agent.parameters.items()
    ]


def _checksum(key: str, expected: str, model: str) -> FileChecksum:
    algorithm, colon, file = key.partition(":")
    if not colon:
        raise InferenceError(Code.INVALID_ARG, f"failed to parse key: {key}")
    if algorithm.lower() not in ALGORITHMS:
        raise InferenceError(
            Code.UNSUPPORTED, f"Unsupported checksum algorithm: {algorithm}; expected MD5 or SHA256"
        )
    if leaves_folder(file) or "\0" in file:
        raise InferenceError(
            Code.INVALID_ARG,
            f"checksum of file '{file}' of model '{model}': it must stay within the model's folder",
        )
    return FileChecksum(algorithm.lower(), file, expected)


def verify(demanded: Iterable[FileChecksum], folder: Path) -> None:
    """Verify the checksums in order; raises like `FileChecksum.verify`. Blocks."""
    for each in demanded:
        each.verify(folder)
