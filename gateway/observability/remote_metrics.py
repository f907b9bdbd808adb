"""Metrics of repositories in object storage, and of their cache."""

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.backend import MetricReading

DOWNLOAD = "gateway_remote_download_seconds"
REMOTE_METRICS = {
    "gateway_remote_up": ("gauge", "1 if the last listing of a repository succeeded, else 0"),
    "gateway_remote_cache_bytes": ("gauge", "Bytes of the cache of repositories"),
    "gateway_remote_bytes_total": ("counter", "Bytes downloaded from object storage"),
    "gateway_remote_requests_total": ("counter", "Requests to object storage"),
    "gateway_remote_cache_hits_total": ("counter", "Files of loads that were in the cache"),
    DOWNLOAD: ("summary", "Seconds of the downloads of loads"),
}
"""Kind and documentation of each family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteReading:
    """The values of repositories in object storage, and of their cache; `up` is by address."""

    up: Mapping[str, bool]
    byte_count: int
    requests: int
    cache_bytes: int
    cache_hits: int
    downloads: int
    download_secs: float


def remote_families(found: RemoteReading | None) -> list[MetricReading]:
    """The families of repositories in object storage; none without any."""
    if found is None:
        return []
    by_name = {
        name: MetricReading(name, text, kind) for name, (kind, text) in REMOTE_METRICS.items()
    }
    for name, value in {
        "gateway_remote_cache_bytes": found.cache_bytes,
        "gateway_remote_bytes_total": found.byte_count,
        "gateway_remote_requests_total": found.requests,
        "gateway_remote_cache_hits_total": found.cache_hits,
    }.items():
        by_name[name].add_sample(name, {}, value)
    for address, up in found.up.items():
        by_name["gateway_remote_up"].add_sample("gateway_remote_up", {"repository": address}, up)
    by_name[DOWNLOAD].add_sample(f"{DOWNLOAD}_count", {}, found.downloads)
    by_name[DOWNLOAD].add_sample(f"{DOWNLOAD}_sum", {}, found.download_secs)
    return list(by_name.values())
