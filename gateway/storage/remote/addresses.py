"""Addresses of repositories in object storage, in Triton's forms."""

import re
from dataclasses import dataclass

SCHEMES = ("s3", "gs", "as")


class AddressError(ValueError):
    """An address without a bucket, or with a part that no address has; the text names it."""


@dataclass(frozen=True, slots=True)
class Address:
    """A bucket, or a container of an Azure account, and a prefix of its keys.

    `endpoint` is empty for AWS and Google, and an account for Azure.
    """

    scheme: str
    endpoint: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        parts = (self.endpoint, self.bucket, self.prefix)
        return f"{self.scheme}://{'/'.join(part for part in parts if part)}"


def is_remote(text: str) -> bool:
    """Whether this names object storage and not a local folder."""
    return text.startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


def parse_address(text: str) -> Address:
    """The parts of an address; AddressError if it has no bucket or a part that is refused."""
    scheme, _, rest = text.partition("://")
    # Regex, not urlsplit: a key may have any character.
    endpoint, rest = _endpoint(rest) if scheme == "s3" else ("", rest)
    parts = [part for part in rest.split("/") if part]
    if scheme == "as":
        endpoint, parts = (parts[0] if parts else ""), parts[1:]
    if not parts:
        raise AddressError(f"No bucket name found in path: {text}")
    return Address(scheme, endpoint, parts[0], "/".join(parts[1:]))


def _endpoint(rest: str) -> tuple[str, str]:
    if found := re.match(r"(https?://[^/]+)/*(.*)", rest):
        return found[1], found[2]
    if found := re.match(r"([0-9A-Za-z.-]+:[0-9]+)(?:/+(.*))?$", rest):
        return f"http://{found[1]}", found[2] or ""
    return "", rest
