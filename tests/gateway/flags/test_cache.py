"""Options of the response cache become settings; invalid ones are refused."""

import argparse
import logging
from collections.abc import Mapping

import pytest

from gateway.cache_settings import CacheSettings, LocalCacheSettings, RedisCacheSettings
from gateway.errors import Code, InferenceError
from gateway.flags import cache as cache_flags

ADDRESS = "--cache-config=redis,host=h,port=6379"


def parse(*arguments: str, environment: Mapping[str, str] | None = None) -> CacheSettings | None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    cache_flags.add_flags(parser)
    return cache_flags.cache_settings(parser.parse_args(arguments), environment or {})


def redis(*arguments: str, environment: Mapping[str, str] | None = None) -> RedisCacheSettings:
    found = parse(ADDRESS, *arguments, environment=environment)
    assert isinstance(found, RedisCacheSettings)
    return found


def refusal(*arguments: str) -> str:
    with pytest.raises(InferenceError) as caught:
        parse(*arguments)
    assert caught.value.code is Code.INVALID_ARG
    return caught.value.message


def test_there_is_no_cache_unless_one_is_asked_for() -> None:
    assert parse() is None
    assert parse("--cache-directory=/opt/tritonserver/caches") is None


def test_a_local_cache_has_a_size() -> None:
    assert parse("--cache-config=local,size=1048576") == LocalCacheSettings(byte_size=1048576)


@pytest.mark.parametrize("size", ["0", "-1", "abc", "1e6", "²", "4.0"])
def test_a_size_is_a_number_of_bytes(size: str) -> None:
    assert refusal(f"--cache-config=local,size={size}") == (
        "Failed to initialize LocalCache: config didn't contain a valid 'size' field. "
        f"Got '{size}', expected bytes, at least 1"
    )


@pytest.mark.parametrize("size", ["0", "-1"])
def test_so_is_one_in_the_old_spelling(size: str) -> None:
    assert f"Got '{size}'" in refusal(f"--response-cache-byte-size={size}")


def test_the_old_spelling_is_a_local_cache(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse("--response-cache-byte-size=4096") == LocalCacheSettings(byte_size=4096)
    assert "'--response-cache-byte-size' has been deprecated!" in caplog.text
    assert "'--cache-config=local,size=4096'" in caplog.text


def test_both_spellings_together_are_refused() -> None:
    assert refusal("--response-cache-byte-size=4096", "--cache-config=local,size=4096") == (
        "Error: Incompatible flags --response-cache-byte-size and --cache-config both provided. "
        "Please provide one or the other."
    )


def test_there_is_one_cache() -> None:
    assert refusal("--cache-config=local,size=9", "--cache-config=redis,host=h") == (
        "found multiple cache configurations, but only a single cache is currently supported"
    )


def test_a_cache_that_does_not_exist_is_refused() -> None:
    assert refusal("--cache-config=nope,size=9") == (
        "unable to find cache 'nope', expected one of local, redis"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("local", "No cache specified."),
        (",size=9", "No cache specified."),
        ("size=9", "No cache specified."),
        ("local,size", "--cache-config option format is '<cache name>,<setting>=<value>'. Got"),
        ("local,size=", "--cache-config option format is '<cache name>,<setting>=<value>'. Got"),
        ("local,=9", "--cache-config option format is '<cache name>,<setting>=<value>'. Got"),
        ("redis,host=h,port=", "--cache-config option format is"),
    ],
)
def test_the_format_is_tritons(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentError) as caught:
        parse(f"--cache-config={text}")
    assert str(caught.value.message).startswith(message)
    assert str(caught.value.message).endswith(f"Got {text}")


@pytest.mark.parametrize("text", ["local,sise=9", "redis,unix_socket=x,host=h,port=1"])
def test_an_unknown_setting_is_refused(text: str) -> None:
    message = refusal(f"--cache-config={text}")
    cache = text.partition(",")[0]
    assert message.startswith(f"--cache-config {cache}: there is no setting '")


def test_settings_may_come_together_or_one_by_one() -> None:
    one_by_one = parse("--cache-config=redis,host=h", "--cache-config=redis,port=6379")
    assert one_by_one == redis() == RedisCacheSettings(host="h", port=6379)


def test_a_value_may_have_commas() -> None:
    assert redis("--cache-config=redis,password=a,b=c,d,db=3") == RedisCacheSettings(
        host="h", port=6379, password="a,b=c,d", db=3
    )


@pytest.mark.parametrize("text", ["host=h", "port=1", "password=x"])
def test_redis_needs_an_address(text: str) -> None:
    assert refusal(f"--cache-config=redis,{text}").startswith(
        "Failed to initialize RedisCache, didn't specify address. Must at a minimum specify 'host' "
        "and 'port' in the configuration"
    )


def test_redis_has_all_settings() -> None:
    rest = "user=u,connect_timeout=7,socket_timeout=8,pool_size=4,wait_timeout=9,tls_enabled=true"
    assert redis(f"--cache-config=redis,{rest},cert=c,key=k,cacert=a,cacert_dir=d,sni=h") == (
        RedisCacheSettings(
            host="h",
            port=6379,
            user="u",
            connect_timeout_ms=7,
            socket_timeout_ms=8,
            tls=True,
            cert="c",
            key="k",
            cacert="a",
            cacert_dir="d",
        )
    )


@pytest.mark.parametrize("key", ["cert", "key", "cacert", "cacert_dir"])
def test_a_file_for_tls_turns_it_on(key: str) -> None:
    assert redis(f"--cache-config=redis,{key}=file").tls
    assert not redis(f"--cache-config=redis,{key}=file,tls_enabled=false").tls


def test_credentials_may_come_from_the_environment() -> None:
    environment = {"TRITONCACHE_REDIS_USERNAME": "u", "TRITONCACHE_REDIS_PASSWORD": "p"}
    found = redis(environment=environment)
    assert (found.user, found.password) == ("u", "p")
    found = redis("--cache-config=redis,user=v", environment=environment)
    assert (found.user, found.password) == ("v", "p")
    assert "'p'" not in repr(found)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("port=70000", "'port': '70000'"),
        ("db=-1", "'db' is '-1'"),
        ("socket_timeout=1.5", "'socket_timeout' is '1.5'"),
        ("connect_timeout=x", "'connect_timeout' is 'x'"),
        ("tls_enabled=maybe", "'tls_enabled': invalid value for bool option: maybe"),
        ("sni=other", "'sni' is 'other'"),
    ],
)
def test_values_of_the_wrong_kind_are_named(text: str, named: str) -> None:
    message = refusal(ADDRESS, f"--cache-config=redis,{text}")
    assert message.startswith(f"--cache-config redis: {named}")
