"""Certificates in key files: their fields and rules, and the keys around them."""

from pathlib import Path

import pytest

from gateway.policy.key_file import KeyFileError, KeyReader, text_of_key, without_key
from gateway.policy.keys import ApiKey, ListedCertificate, Role

KEY = text_of_key(ApiKey("ONEONEON", bytes(32), "search"))
NAME = "URI:spiffe://prod/ns/web/sa/frontend"
ONE = f'[[certificates]]\nsan = "{NAME}"\ntenant = "web"\n'
TWO = '[[certificates]]\nsan = "CN:Ana"\ntenant = "ops"\nroles = ["admin"]\n'


def with_field(line: str) -> str:
    """The certificate with another line, in place of one of the same field."""
    name = line.partition(" ")[0]
    return (
        "\n".join([each for each in ONE.splitlines() if not each.startswith(f"{name} ")] + [line])
        + "\n"
    )


def test_keys_and_certificates_are_read_in_any_order() -> None:
    for text in (KEY + ONE + TWO, ONE + KEY + TWO, TWO + "\n" + ONE + "# of all\n" + KEY):
        table = KeyReader().read(text)
        assert list(table.keys) == ["ONEONEON"]
        assert set(table.certificates) == {NAME, "CN:Ana"}
    assert table.certificates[NAME] == ListedCertificate(NAME, "web")
    assert table.certificates["CN:Ana"].roles == {Role.ADMIN}
    assert table.certificates[NAME].caller.tenant == "web"
    assert table.certificates[NAME].caller.key_id == NAME


def test_every_field_is_read() -> None:
    fields = 'roles = ["observe"]\nexpires = 2027-01-31T01:00:00+01:00\nnote = "of Ana"\n'
    found = KeyReader().read(with_field('san = "DNS:A.Example"') + fields)
    assert list(found.certificates) == ["DNS:a.example"]
    certificate = found.certificates["DNS:a.example"]
    assert certificate.roles == {Role.OBSERVE}
    assert certificate.expires == 1801353600
    assert certificate.note == "of Ana"
    assert found.expiring == [certificate]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ONE + ONE, f"certificate '{NAME}' is there twice"),
        (
            with_field('san = "DNS:A"') + with_field('san = "DNS:a"'),
            "certificate 'DNS:a' is there twice",
        ),
        ("certificates = 3", "'certificates' is no list of tables, expected"),
        ("certificates = [3]", "certificate 1 is no table, expected"),
        (with_field("scope = 1"), f"certificate '{NAME}': unknown field 'scope', expected san, te"),
        (with_field('hash = "x"'), "unknown field 'hash'"),
        (with_field('san = "spiffe://a"'), "certificate 1: 'san' is 'spiffe://a', expected URI:, "),
        (with_field('san = "IP:127.0.0.1"'), "expected URI:, DNS: or CN: and the name"),
        (with_field('san = "URI:"'), "'san' is 'URI:', expected URI:"),
        (with_field('san = "CN:a\\nb"'), "'san' is 'CN:a"),
        (with_field(f'san = "CN:{"a" * 257}"'), "'san' is 'CN:a"),
        (with_field("san = 3"), "'san' is 3, expected URI:"),
        (with_field('tenant = ""'), f"certificate '{NAME}': 'tenant' is ''"),
        (with_field("roles = []"), "'roles' is .., expected a list with at least one"),
        (with_field("expires = 2027-01-31"), "'expires' is 2027-01-31, expected a time as"),
        (ONE.replace("tenant", "# tenant"), f"certificate '{NAME}': 'tenant' is missing"),
        (ONE.replace("san", "# san"), "certificate 1: 'san' is missing"),
    ],
)
def test_a_wrong_certificate_is_refused_with_the_place_and_what_was_expected(
    text: str, says: str
) -> None:
    with pytest.raises(KeyFileError, match=says):
        KeyReader().read(text)
    reader = KeyReader()
    reader.read(KEY + TWO)
    with pytest.raises(KeyFileError, match=says):
        reader.read(text)


def test_no_error_shows_a_key_in_the_place_of_a_name() -> None:
    for name in ("sk-sluice-7K3QW2MZ-secret-ABCDEF", "CN:sk-sluice-7K3QW2MZ-secret-ABCDEF"):
        with pytest.raises(KeyFileError) as refused:
            KeyReader().read(with_field(f'san = "{name}"') + "scope = 1\n")
        assert "secret" not in str(refused.value)


def test_a_certificate_whose_rights_have_not_changed_is_the_same() -> None:
    reader = KeyReader()
    before = reader.read(KEY + ONE).certificates[NAME]
    assert reader.read(ONE + 'note = "new"\n' + KEY).certificates[NAME] is before
    assert reader.read(ONE + 'roles = ["admin"]\n').certificates[NAME] is not before
    assert reader.read(KEY).certificates == {}


def test_a_removed_key_leaves_the_certificates_around_it() -> None:
    assert without_key(ONE + "\n" + KEY + "\n" + TWO, "ONEONEON") == ONE + "\n" + TWO


def test_a_certificate_cannot_be_removed_as_a_key() -> None:
    with pytest.raises(KeyFileError, match="it has no key 'CN:Ana'"):
        without_key(TWO, "CN:Ana")


def test_a_certificate_is_no_key(tmp_path: Path) -> None:
    text = with_field('san = "CN:abcde"')
    table = KeyReader().read(text)
    assert table.find(b"sk-sluice-CN:abcde-x-y", 0.0) is None
