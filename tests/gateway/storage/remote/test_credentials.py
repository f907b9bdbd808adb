"""Credentials of the environment, and of Triton's credential file."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.storage.remote.addresses import parse_address
from gateway.storage.remote.credentials import FILE, CredentialError, read_credential

KEYS = {"AWS_ACCESS_KEY_ID": "K", "AWS_SECRET_ACCESS_KEY": "SECRET"}


def found(address: str, content: Any, folder: Path) -> dict[str, str]:
    """The credential for an address in a file of that content; the environment has other keys."""
    path = folder / "credentials.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return dict(read_credential(parse_address(address), {**KEYS, FILE: str(path)}))


def test_the_environment_has_tritons_variables() -> None:
    environment = {
        **KEYS,
        "AWS_SESSION_TOKEN": "",
        "AWS_DEFAULT_REGION": "eu-1",
        "GOOGLE_APPLICATION_CREDENTIALS": "/key.json",
        "AZURE_STORAGE_ACCOUNT": "account",
        "AZURE_STORAGE_KEY": "key",
    }
    credentials = {
        text: read_credential(parse_address(text), environment)
        for text in ("s3://b", "gs://b", "as://a/b")
    }
    assert credentials == {
        "s3://b": {"key_id": "K", "secret_key": "SECRET", "region": "eu-1"},
        "gs://b": {"path": "/key.json"},
        "as://a/b": {"account_str": "account", "account_key": "key"},
    }


def test_the_longest_prefix_of_the_address_wins(tmp_path: Path) -> None:
    file = {
        "s3": {
            "": {"key_id": "default"},
            "s3://host:9000/models/team-a": {"key_id": "of a", "secret_key": "", "other": 1},
            "s3://host:9000/models": {"key_id": "of models"},
        },
        "gs": {"gs://b": "/keys/sa.json", "": ""},
        "else": 1,
    }
    addresses = (
        "s3://b",
        "s3://host:9000/models/team-b",
        "s3://host:9000/models/team-a/x",
        "gs://b/x",
        "gs://c",
    )
    assert [found(address, file, tmp_path) for address in addresses] == [
        {"key_id": "default"},
        {"key_id": "of models"},
        {"key_id": "of a"},
        {"path": "/keys/sa.json"},
        {},
    ]


@pytest.mark.parametrize("file", [{}, {"s3": {}}, {"s3": {"s3://other": {"key_id": "K"}}}])
def test_an_address_without_a_prefix_has_no_credential(file: Any, tmp_path: Path) -> None:
    # Triton's words have two blanks.
    with pytest.raises(
        CredentialError, match=r"^Cannot match credential for path  s3://b: "
    ) as raised:
        found("s3://b", file, tmp_path)
    assert str(tmp_path) not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ('{"s3": \n SECRET', "is no JSON at line 2"),
        (b"\xff".decode("latin-1"), "is no JSON at line 1"),
        ("[]", "has list for an object"),
        ('{"s3": "SECRET"}', "has str for an object"),
        ('{"s3": {"": "SECRET"}}', "has str for an object"),
        ('{"s3": {"": {"key_id": 12345}}}', "has a value that is no string"),
    ],
)
def test_a_damaged_credential_file_is_named_without_its_content(
    content: str, error: str, tmp_path: Path
) -> None:
    with pytest.raises(CredentialError, match="TRITON_CLOUD_CREDENTIAL_PATH") as raised:
        found("s3://b", content, tmp_path)
    assert error in str(raised.value)
    assert "SECRET" not in str(raised.value)
    assert "12345" not in str(raised.value)
    assert str(tmp_path) not in str(raised.value)


def test_a_missing_credential_file_is_named_by_its_variable(tmp_path: Path) -> None:
    environment = {FILE: str(tmp_path / "none.json")}
    with pytest.raises(CredentialError, match=f"the file of {FILE}: No such file") as raised:
        read_credential(parse_address("s3://b"), environment)
    assert str(tmp_path) not in str(raised.value)
