"""Addresses of repositories in object storage, in Triton's forms."""

import re
from dataclasses import dataclass

SCHEMES = ("s3", "gs", "as")
AZURE_HOST = ".blob.core.windows.net"
REFUSED = {"?": "a query", "#": "a fragment"}


class AddressError(ValueError):
    """An address without a bucket, or with a part that no address has.

    The text repeats an address only if nothing in it can be a secret.
    """


@dataclass(frozen=True, slots=True)
class Address:
    """A bucket (of Azure: a container) and a prefix of its keys.

    `endpoint` is a URL of S3, an account or a URL of Azure, and empty for AWS and Google. `text`
    is the address as it was given.
    """

    scheme: str
    endpoint: str
    bucket: str
    prefix: str
    text: str

    @property
    def origin(self) -> str:
        """The one form of all addresses of these objects."""
        parts = (self.endpoint, self.bucket, self.prefix)
        return f"{self.scheme}://{'/'.join(part for part in parts if part)}"


def is_remote(text: str) -> bool:
    """Whether this names object storage and not a local folder."""
    return text.startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


def parse_address(text: str) -> Address:
    """The parts of an address; AddressError if it has no bucket or a part that is refused."""
    scheme, _, rest = text.partition("://")
    for sign, name in REFUSED.items():
        if sign in rest:
            raise AddressError(_refusal(scheme, name))
    endpoint, parts = _parts(scheme, rest)
    if not parts or not parts[0]:
        missing = "Invalid azure storage path" if scheme == "as" else "No bucket name found in path"
        place = "ACCOUNT/CONTAINER" if scheme == "as" else "BUCKET"
        raise AddressError(f"{missing}: {text}; expected {scheme}://{place}[/PREFIX]")
    if {".", ".."} & set(parts):
        raise AddressError(f"'{text}' has '.' or '..' between slashes, expected names of folders")
    return Address(scheme, endpoint, parts[0], "/".join(parts[1:]), text)


def _parts(scheme: str, rest: str) -> tuple[str, list[str]]:
    """The endpoint, and the names between slashes after it."""
    protocol = re.match("https?://", rest) if scheme == "s3" else None
    names = [name for name in rest[protocol.end() if protocol else 0 :].split("/") if name]
    first = names[0] if names else ""
    if "@" in first:
        raise AddressError(_refusal(scheme, "a user"))
    if scheme == "as":
        return first.removesuffix(AZURE_HOST), names[1:]
    if not protocol and ":" not in first:
        return "", names
    if not re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z.-]+)(:[0-9]{1,5})?", first):
        # A secret key may have slashes, so that its '@' is not before the first of them.
        raise AddressError(
            f"an address of {scheme}:// has ':' but no port, expected HOST:PORT/BUCKET; "
            "credentials belong into the environment"
        )
    return f"{protocol[0] if protocol else 'http://'}{first}", names[1:]


def _refusal(scheme: str, part: str) -> str:
    return (
        f"an address of {scheme}:// has {part}, expected a bucket and a prefix only: credentials "
        "belong into the environment or the file of TRITON_CLOUD_CREDENTIAL_PATH"
    )
