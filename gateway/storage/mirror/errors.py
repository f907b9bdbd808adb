"""Errors of mirrors; their texts reach clients, and name no folder of this machine."""

import errno

from gateway.storage.store import NO_SPACE, StoreError

ELSEWHERE = "or set SLUICE_CACHE to a folder on another disk"
"""The last fix of errors of the disk."""


class MirrorError(StoreError):
    """A remote repository cannot be listed, downloaded or kept; the text names cause and fix."""


class ModelUploading(MirrorError):
    """A model that another program is writing, by its marker."""

    def __init__(self, model: str) -> None:
        super().__init__(f"model '{model}' is being uploaded: it has a file .uploading")


class DownloadStopped(MirrorError):
    """The load that needed a download has ended."""


def disk_error(error: OSError) -> MirrorError:
    """The error of a write to the cache."""
    if error.errno in NO_SPACE:
        return MirrorError(
            f"no space is left on the disk of the cache: make some, lower --remote-cache-size, "
            f"{ELSEWHERE}"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return MirrorError(f"no permission to write into the cache: grant it, {ELSEWHERE}")
    return MirrorError(f"the cache cannot be used: {error.strerror}")
