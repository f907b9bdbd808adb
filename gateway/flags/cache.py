"""Options of the response cache."""

import argparse
import logging
import re
from collections.abc import Mapping, Sequence

from gateway.cache_settings import CacheSettings, LocalCacheSettings, RedisCacheSettings
from gateway.errors import Code, InferenceError
from gateway.flags.values import port, truth

log = logging.getLogger("sluice.flags")

Setting = tuple[str, str, str]

LOCAL, REDIS = "local", "redis"
KEYS = {
    LOCAL: frozenset({"size"}),
    REDIS: frozenset(
        {
            *("host", "port", "user", "password", "db", "connect_timeout", "socket_timeout"),
            *("pool_size", "wait_timeout"),
            *("tls_enabled", "cert", "key", "cacert", "cacert_dir", "sni"),
        }
    ),
}
"""Settings of each cache."""
TLS_FILES = ("cert", "key", "cacert", "cacert_dir")
FORMAT = "--cache-config option format is '<cache name>,<setting>=<value>'. Got"


def cache_setting(text: str) -> list[Setting]:
    """`CACHE,KEY=VALUE` of --cache-config; more settings may follow, each behind a comma."""
    cache, comma, rest = text.partition(",")
    if not (cache and comma):
        raise argparse.ArgumentTypeError(
            "No cache specified. --cache-config option format is "
            f"<cache name>,<setting>=<value>. Got {text}"
        )
    keys = "|".join(sorted(KEYS.get(cache, ())))
    found = [each.partition("=") for each in re.split(rf",(?=(?:{keys})=)", rest)]
    if not all(key and value for key, _, value in found):
        raise argparse.ArgumentTypeError(f"{FORMAT} {text}")
    return [(cache, key, value) for key, _, value in found]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    group = parser.add_argument_group("response cache")
    group.add_argument(
        "--cache-config",
        action="append",
        default=[],
        type=cache_setting,
        metavar="CACHE,KEY=VALUE",
        help="cache responses of models with response_cache: local,size=BYTES or "
        "redis,host=HOST,port=PORT; repeatable",
    )
    group.add_argument(
        "--cache-directory",
        metavar="DIR",
        help="accepted for compatibility, no effect: caches are built in",
    )
    group.add_argument(
        "--response-cache-byte-size",
        type=int,
        metavar="BYTES",
        help="deprecated: --cache-config=local,size=BYTES",
    )


def cache_settings(
    flags: argparse.Namespace, environment: Mapping[str, str]
) -> CacheSettings | None:
    """Settings from the parsed options, None for no cache; INVALID_ARG as Triton."""
    given: Sequence[Setting] = [setting for one in flags.cache_config for setting in one]
    if flags.response_cache_byte_size is not None:
        if given:
            raise _invalid(
                "Error: Incompatible flags --response-cache-byte-size and --cache-config both "
                "provided. Please provide one or the other."
            )
        given = [_deprecated(str(flags.response_cache_byte_size))]
    if not given:
        return None
    names = {cache for cache, _, _ in given}
    if len(names) > 1:
        raise _invalid(
            "found multiple cache configurations, but only a single cache is currently supported"
        )
    return _settings(names.pop(), {key: value for _, key, value in given}, environment)


def _deprecated(size: str) -> Setting:
    log.warning(
        "'--response-cache-byte-size' has been deprecated! This will default to the 'local' cache "
        "implementation with the provided byte size for its config. Please use '--cache-config' "
        "instead. The equivalent --cache-config CLI args would be: '--cache-config=local,size=%s'",
        size,
    )
    return LOCAL, "size", size


def _settings(
    cache: str, given: Mapping[str, str], environment: Mapping[str, str]
) -> CacheSettings:
    if cache not in KEYS:
        raise _invalid(f"unable to find cache '{cache}', expected one of {', '.join(KEYS)}")
    if unknown := sorted(set(given) - KEYS[cache]):
        raise _invalid(
            f"--cache-config {cache}: there is no setting '{unknown[0]}', expected one of "
            f"{', '.join(sorted(KEYS[cache]))}"
        )
    return _local(given) if cache == LOCAL else _redis(given, environment)


def _local(given: Mapping[str, str]) -> LocalCacheSettings:
    size = given.get("size", "")
    if not (size.isascii() and size.isdigit() and int(size)):
        raise _invalid(
            "Failed to initialize LocalCache: config didn't contain a valid 'size' field."
            + (f" Got '{size}', expected bytes, at least 1" if size else "")
        )
    return LocalCacheSettings(byte_size=int(size))


def _redis(given: Mapping[str, str], environment: Mapping[str, str]) -> RedisCacheSettings:
    if "host" not in given or "port" not in given:
        raise _invalid(
            "Failed to initialize RedisCache, didn't specify address. Must at a minimum specify "
            "'host' and 'port' in the configuration - e.g. --cache-config redis,host=redis "
            "--cache-config redis,port=6379"
        )
    _refuse_other_name(given)
    files = {key: given[key] for key in TLS_FILES if key in given}
    return RedisCacheSettings(
        host=given["host"],
        port=_port(given["port"]),
        user=given.get("user", environment.get("TRITONCACHE_REDIS_USERNAME", "")),
        password=given.get("password", environment.get("TRITONCACHE_REDIS_PASSWORD", "")),
        db=_number(given, "db", 0),
        connect_timeout_ms=_number(given, "connect_timeout", 1000),
        socket_timeout_ms=_number(given, "socket_timeout", 100),
        tls=_truth(given.get("tls_enabled", "true" if files or "sni" in given else "false")),
        **files,
    )


def _refuse_other_name(given: Mapping[str, str]) -> None:
    if given.get("sni", given["host"]) != given["host"]:
        raise _invalid(
            f"--cache-config redis: 'sni' is '{given['sni']}', but the server is asked for by the "
            f"name in 'host', '{given['host']}'; its certificate must have that name"
        )


def _port(text: str) -> int:
    try:
        return port(text)
    except argparse.ArgumentTypeError as error:
        raise _invalid(f"--cache-config redis: 'port': {error}") from None


def _truth(text: str) -> bool:
    try:
        return truth(text)
    except argparse.ArgumentTypeError as error:
        raise _invalid(f"--cache-config redis: 'tls_enabled': {error}") from None


def _number(given: Mapping[str, str], key: str, default: int) -> int:
    text = given.get(key, str(default))
    if not (text.isascii() and text.isdigit()):
        raise _invalid(
            f"--cache-config redis: '{key}' is '{text}', expected a whole number of at least 0"
        )
    return int(text)


def _invalid(message: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, message)
