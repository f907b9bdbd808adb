"""The key file of the soak: keys of tenants and an admin, and of a guest that comes and goes."""

import random
from pathlib import Path

from gateway.policy.key_file import text_of_key
from gateway.policy.keys import ApiKey, Role, new_key

TENANTS = ("red", "green", "blue")
WRONG = ("Bearer", "Basic c29hazpzb2Fr", "Bearer \x7f", "Bearer sk-nothing")
"""Credentials that are none."""


class Keys:
    """Made when the soak begins; `file` is read again by the server after each change."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "keys.toml"
        self._admin, self._guest = new_key(), new_key()
        self._tenants = {name: new_key() for name in TENANTS}
        self.write(with_guest=True)

    def write(self, *, with_guest: bool) -> None:
        """Replace the file."""
        roles = frozenset({Role.ADMIN})
        _, key_id, digest = self._admin
        parts = [text_of_key(ApiKey(key_id, digest, "ops", roles=roles))]
        guest = {"guest": self._guest} if with_guest else {}
        for tenant, (_, key_id, digest) in (self._tenants | guest).items():
            parts.append(text_of_key(ApiKey(key_id, digest, tenant)))
        new = self.file.with_suffix(".new")
        new.write_text("\n".join(parts))
        new.chmod(0o600)
        new.replace(self.file)

    def of(self, client: int) -> str:
        """The credential of a client, by its tenant."""
        return f"Bearer {self._tenants[TENANTS[client % len(TENANTS)]][0]}"

    @property
    def admin(self) -> str:
        """The credential for changes of the server."""
        return f"Bearer {self._admin[0]}"

    @property
    def guest(self) -> str:
        """The credential that is valid at times."""
        return f"Bearer {self._guest[0]}"

    def wrong(self, chance: random.Random) -> str:
        """A credential that is none: malformed, unknown, or almost one."""
        almost = f"{self.of(chance.randrange(len(TENANTS)))[:-1]}-"
        return chance.choice((*WRONG, f"Bearer {new_key()[0]}", almost))
