"""Credentials of object storage: Triton's variables and its credential file."""

import json
from collections.abc import Mapping
from typing import Any

from gateway.storage.remote.addresses import Address

FILE = "TRITON_CLOUD_CREDENTIAL_PATH"
VARIABLES = {
    "s3": {
        "key_id": "AWS_ACCESS_KEY_ID",
        "secret_key": "AWS_SECRET_ACCESS_KEY",
        "session_token": "AWS_SESSION_TOKEN",
        "region": "AWS_DEFAULT_REGION",
        "profile": "AWS_PROFILE",
    },
    "gs": {"path": "GOOGLE_APPLICATION_CREDENTIALS"},
    "as": {
        "account_str": "AZURE_STORAGE_ACCOUNT",
        "account_key": "AZURE_STORAGE_KEY",
        "auth_type": "AZURE_STORAGE_AUTH_TYPE",
        "client_id": "AZURE_STORAGE_CLIENT_ID",
    },
}
"""The members of a credential, and the variable of each."""


class CredentialError(Exception):
    """Credentials that cannot be read or used; the text names the cause, no secret and no path."""


def read_credential(address: Address, environment: Mapping[str, str]) -> Mapping[str, str]:
    """The members of the credential for an address; those without a value are missing.

    With a credential file the variables of the clouds count for nothing.
    """
    if path := environment.get(FILE):
        return _from_file(path, address)
    named = VARIABLES[address.scheme].items()
    return {member: value for member, name in named if (value := environment.get(name))}


def _from_file(path: str, address: Address) -> Mapping[str, str]:
    """The credential of the longest prefix of the address."""
    credentials = _object(_parsed(path).get(address.scheme, {}))
    matching = [prefix for prefix in credentials if address.text.startswith(prefix)]
    if not matching:
        # Triton's words, with its two blanks.
        raise CredentialError(
            f"Cannot match credential for path  {address.text}: the file of {FILE} has no "
            f'prefix of it in "{address.scheme}"; add one, or "" for all'
        )
    prefix = max(matching, key=len)
    found = credentials[prefix]
    members = {"path": found} if address.scheme == "gs" else _object(found)
    known = {name: value for name, value in members.items() if name in VARIABLES[address.scheme]}
    if not all(isinstance(value, str) for value in known.values()):
        raise CredentialError(f"the file of {FILE} has a value that is no string: correct it")
    return {name: value for name, value in known.items() if value}


def _parsed(path: str) -> Mapping[str, Any]:
    try:
        with open(path, "rb") as file:
            return _object(json.load(file))
    except OSError as error:
        raise CredentialError(f"cannot read the file of {FILE}: {error.strerror}") from None
    except ValueError as error:
        place = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise CredentialError(f"the file of {FILE} is no JSON{place}: correct it") from None


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CredentialError(
            f"the file of {FILE} has {type(value).__name__} for an object of JSON, expected "
            '{"s3": {"PREFIX": {"key_id": ...}}}'
        )
    return value
