"""The command `sluice key`: makes, lists and revokes the keys of a key file."""

import argparse
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway.policy.key_file import (
    KeyFileError,
    KeyReader,
    changing_key_file,
    read_key_file,
    text_of_key,
    without_key,
)
from gateway.policy.keys import ApiKey, KeyTable, Role, new_key
from gateway.policy.tenants import TenantRules


def run(parsed: argparse.Namespace) -> None:
    """Run the action; KeyFileError if it fails."""
    try:
        ACTIONS[parsed.action](parsed)
    except KeyFileError as error:
        raise KeyFileError(f"--file {parsed.file}: {error}") from None
    except OSError as error:
        raise KeyFileError(f"--file {parsed.file}: {error.strerror}") from None


def _new(parsed: argparse.Namespace) -> None:
    secret, key_id, digest = new_key()
    key = ApiKey(
        id=key_id,
        digest=digest,
        tenant=parsed.tenant,
        roles=frozenset(parsed.role or (Role.INFER,)),
        expires=parsed.expires,
        models=tuple(parsed.models),
        note=parsed.note,
    )
    with changing_key_file(parsed.file) as replace:
        before = read_key_file(parsed.file) if parsed.file.exists() else ""
        after = f"{before.rstrip()}\n\n{text_of_key(key)}".lstrip()
        KeyReader().read(after)  # the values of the options, too
        replace(after)
    sys.stderr.write(
        f"added key {key_id} of tenant '{key.tenant}' to {parsed.file}; it is shown only here:\n"
    )
    sys.stdout.write(f"{secret}\n")


def _list(parsed: argparse.Namespace) -> None:
    found = KeyReader().read(read_key_file(parsed.file))
    Console().print(table(found, time.time()))
    if found.tenants:
        Console().print(table_of_tenants(found.tenants))


def _revoke(parsed: argparse.Namespace) -> None:
    with changing_key_file(parsed.file) as replace:
        replace(without_key(read_key_file(parsed.file), parsed.id))
    sys.stderr.write(f"revoked key {parsed.id}\n")


def table(keys: KeyTable, now: float) -> Table:
    """A row for each key, and for each certificate with its name as the id."""
    found = Table("id", "tenant", "roles", "models", "expires", "note")
    for key in keys.listed():
        found.add_row(
            key.id if isinstance(key, ApiKey) else escape(key.name),
            key.tenant,
            ", ".join(sorted(key.roles)),
            escape(", ".join(key.models) or "all"),
            _shown_expiry(key.expires, now),
            escape(key.note),
        )
    return found


def table_of_tenants(tenants: Mapping[str, TenantRules]) -> Table:
    """A row for each tenant with rules; a limit that it does not have is empty."""
    names = [each.name for each in fields(TenantRules)]
    found = Table("tenant", *(name.replace("_", " ") for name in names))
    for tenant, rules in tenants.items():
        values = [getattr(rules, name) for name in names]
        found.add_row(tenant, *("" if each is None else f"{each:.12g}" for each in values))
    return found


def _shown_expiry(expires: float, now: float) -> str:
    if expires == math.inf:
        return "never"
    shown = f"{datetime.fromtimestamp(expires, UTC):%Y-%m-%d %H:%M} UTC"
    return f"[red]expired {shown}[/red]" if expires <= now else shown


ACTIONS = {"new": _new, "list": _list, "revoke": _revoke}
