"""Addresses of object storage: Triton's forms, and what is refused by name."""

import pytest

from gateway.storage.remote.addresses import AddressError, is_remote, parse_address

PORT = "http://host:9000"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("s3://models", ("", "models", "")),
        ("s3://models/team/a", ("", "models", "team/a")),
        ("s3://host:9000/models", (PORT, "models", "")),
        ("s3://http://host:9000/models/a", (PORT, "models", "a")),
        ("s3://https://host:443/models/a", ("https://host:443", "models", "a")),
        ("s3://https://storage.example/models/a", ("https://storage.example", "models", "a")),
        ("s3://[::1]:9000/models", ("http://[::1]:9000", "models", "")),
        ("s3:///models//a///b/", ("", "models", "a/b")),
        ("s3://http:///host:9000//models//a/", (PORT, "models", "a")),
        ("s3://my_bucket/a", ("", "my_bucket", "a")),
        ("s3://host:9000/models/a b+c=d@e:f", (PORT, "models", "a b+c=d@e:f")),
        ("gs://models", ("", "models", "")),
        ("gs://models/a/b", ("", "models", "a/b")),
        ("as://account/models", ("account", "models", "")),
        ("as://account.blob.core.windows.net/models/a", ("account", "models", "a")),
    ],
)
def test_an_address_has_an_endpoint_a_bucket_and_a_prefix(
    text: str, parts: tuple[str, str, str]
) -> None:
    address = parse_address(text)
    assert (address.endpoint, address.bucket, address.prefix) == parts


def test_the_forms_of_one_place_have_one_origin() -> None:
    texts = ("s3://host:9000/models/a", "s3://http://host:9000//models/a/")
    assert {parse_address(text).origin for text in texts} == {"s3://http://host:9000/models/a"}
    assert parse_address("gs://models//a").origin == "gs://models/a"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("s3://", "No bucket name found in path: s3://; expected s3://BUCKET[/PREFIX]"),
        ("s3:///", "No bucket name found in path: s3:///"),
        ("s3://https://host:443", "No bucket name found in path: s3://https://host:443"),
        ("s3://host:9000/", "No bucket name found in path: s3://host:9000/"),
        ("gs://", "No bucket name found in path: gs://"),
        ("as://", "Invalid azure storage path: as://"),
        (
            "as://account",
            "Invalid azure storage path: as://account; expected as://ACCOUNT/CONTAINER[/PREFIX]",
        ),
        ("s3://models/a/../b", "'s3://models/a/../b' has '.' or '..' between slashes"),
    ],
)
def test_an_address_without_a_bucket_has_tritons_error(text: str, error: str) -> None:
    with pytest.raises(AddressError) as raised:
        parse_address(text)
    assert str(raised.value).startswith(error)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("s3://user:SECRET@host:9000/models", "a user"),
        ("s3://http://user:SECRET@host:9000/models", "a user"),
        ("s3://SECRET@models/a", "a user"),
        ("as://user:SECRET@account/models", "a user"),
        ("gs://SECRET@models", "a user"),
        ("as://account/models?sv=2024&sig=SECRET", "a query"),
        ("s3://models/a?X-Amz-Signature=SECRET", "a query"),
        ("s3://models/a#SECRET", "a fragment"),
        ("s3://user:SEC/RET@host:9000/models", "':' but no port"),
    ],
)
def test_a_part_that_may_be_secret_is_refused_by_name_and_not_repeated(
    text: str, part: str
) -> None:
    with pytest.raises(AddressError, match="into the environment") as raised:
        parse_address(text)
    assert f" has {part}" in str(raised.value)
    assert "SEC" not in str(raised.value)


def test_local_folders_are_no_addresses() -> None:
    assert [
        text for text in ("s3://a", "gs://a", "as://a/b", "/a", "s3", "C://a") if is_remote(text)
    ] == [
        "s3://a",
        "gs://a",
        "as://a/b",
    ]
