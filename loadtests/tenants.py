"""Key files with tenants for load tests."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.policy.key_file import text_of_key
from gateway.policy.keys import ApiKey, Role, new_key


@dataclass(frozen=True, slots=True)
class Keys:
    """A key file, and the key of each tenant in it."""

    file: Path
    of: Mapping[str, str]

    def headers(self, tenant: str) -> Mapping[str, str]:
        """The headers of a tenant's requests."""
        return {"x-api-key": self.of[tenant]}


def write_tenants(file: Path, tenants: Mapping[str, Mapping[str, float]]) -> Keys:
    """Write a key file with a key for each tenant, and the tenants' rules."""
    roles, keys, parts = frozenset(Role), {}, []
    for tenant, rules in tenants.items():
        keys[tenant], key_id, digest = new_key()
        parts.append(text_of_key(ApiKey(key_id, digest, tenant, roles)))
        lines = [f"{name} = {value}" for name, value in rules.items()]
        parts.append("\n".join([f"[tenants.{tenant}]", *lines, ""]))
    file.touch(0o600)
    file.write_text("\n".join(parts))
    return Keys(file, keys)
