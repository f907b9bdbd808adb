"""Settings of the response cache."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCacheSettings:
    """A response cache in this process, and its size in bytes."""

    byte_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisCacheSettings:
    """A response cache in a Redis server; a timeout of 0 is no limit.

    With `tls` the paths may be "": then the client has no certificate and trusts the system's
    authorities.
    """

    host: str
    port: int
    user: str = ""
    password: str = field(default="", repr=False)
    db: int = 0
    connect_timeout_ms: int = 1000
    socket_timeout_ms: int = 100
    tls: bool = False
    cert: str = ""
    key: str = ""
    cacert: str = ""
    cacert_dir: str = ""


CacheSettings = LocalCacheSettings | RedisCacheSettings
