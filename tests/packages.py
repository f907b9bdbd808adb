"""Pip packages for tests: a folder that python imports from, with files recorded as pip does."""

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Site:
    """A folder of packages and modules."""

    folder: Path

    def install(self, distribution: str, recorded: dict[str, bytes]) -> None:
        """A package with these files, and with their sizes and hashes in its RECORD."""
        metadata = self.folder / f"{distribution.replace('-', '_')}-9.dist-info"
        metadata.mkdir()
        about = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 9\n"
        (metadata / "METADATA").write_text(about)
        lines = [f"{path},{_hash(content)},{len(content)}" for path, content in recorded.items()]
        (metadata / "RECORD").write_text("\n".join(lines) + "\n")
        for path, content in recorded.items():
            self.write(path, content)

    def write(self, path: str, content: bytes) -> Path:
        """Put a file there, with or without a record of it."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        return file


def _hash(content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
    return f"sha256={digest.rstrip('=')}"
