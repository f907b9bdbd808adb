"""Settings of mirrors: the place of the cache, its bound, and the age of settled changes."""

import shutil
from dataclasses import dataclass
from pathlib import Path

PERCENT = 100


@dataclass(frozen=True, slots=True)
class CacheBound:
    """The most bytes of a cache, or the percentage of its file system; 0 keeps what is in use."""

    amount: int
    is_percentage: bool = False

    def bytes_of(self, root: Path) -> int:
        """The bound in bytes."""
        if self.is_percentage:
            return shutil.disk_usage(root).total * self.amount // PERCENT
        return self.amount


DEFAULT_BOUND = CacheBound(80, is_percentage=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRepository:
    """A repository in object storage, and the folder `root` of its cache.

    A change counts once its newest object is `settle_secs` old. `offline` asks the storage nothing.
    """

    address: str
    root: Path
    bound: CacheBound = DEFAULT_BOUND
    settle_secs: float = 5.0
    offline: bool = False
