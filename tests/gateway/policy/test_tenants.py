"""Rules of tenants: what key files may say, and what they may not."""

import pytest

from gateway.policy.key_file import KeyFileError, KeyReader, without_key
from gateway.policy.tenants import MOST_TENANTS, NO_RULES, OTHER, TenantRules, Tenants

HASH = "sha256:" + "0f" * 32
KEY = f'[[keys]]\nid = "ONEONEON"\nhash = "{HASH}"\ntenant = "search"\n'
ALL = """[tenants.search]
weight = 2
requests_per_minute = 600
tokens_per_minute = 200_000
compute_ms_per_minute = 30_000.5
burst = 1.5
max_in_flight = 64
highest_priority = 2
"""


def test_every_member_is_read() -> None:
    assert KeyReader().read(ALL + KEY).tenants == {
        "search": TenantRules(
            weight=2.0,
            requests_per_minute=600.0,
            tokens_per_minute=200_000.0,
            compute_ms_per_minute=30_000.5,
            burst=1.5,
            max_in_flight=64,
            highest_priority=2,
        )
    }


@pytest.mark.parametrize(
    "text",
    [
        "[tenants.a]\n[ tenants . b ]\nweight = 0\n",
        "[tenants.a]\n" + KEY + "\n  [tenants.b]\nweight = 0.0\n",
        KEY + '["tenants".a]\n["tenants".b]\nweight = 0\n',
        "[tenants]\na = {}\nb = {weight = 0}\n",
        "tenants.a = {}\ntenants.b.weight = 0\n",
    ],
)
def test_tables_may_have_any_form_and_place(text: str) -> None:
    reader = KeyReader()
    for _ in range(2):  # the second time from what is known
        table = reader.read(text)
        assert table.tenants == {"a": NO_RULES, "b": TenantRules(weight=0.0)}
        assert ("ONEONEON" in table.keys) is ("[[keys]]" in text)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("weight = -1", "'weight' is -1, expected 0, or a number from 0.001 to 1000000000000"),
        ("weight = nan", "'weight' is nan, expected 0, or"),
        ("weight = 1e400", "'weight' is inf, expected"),
        ("weight = 1e-9", "'weight' is 1e-09, expected"),
        ("weight = 1" + "0" * 400, "'weight' is 1000.*, expected"),
        ('weight = "2"', "'weight' is '2', expected 0, or a number"),
        ("weight = true", "'weight' is True, expected"),
        ("weight = false", "'weight' is False, expected"),
        ("burst = 0", "'burst' is 0, expected a number from 0.001"),
        ("burst = -0.5", "'burst' is -0.5, expected"),
        ("requests_per_minute = 0", "'requests_per_minute' is 0, expected a number"),
        ("tokens_per_minute = [1]", r"'tokens_per_minute' is \[1\], expected a number"),
        ("compute_ms_per_minute = inf", "'compute_ms_per_minute' is inf, expected a number"),
        ("max_in_flight = 1.0", "'max_in_flight' is 1.0, expected a whole number from 1 to"),
        ("max_in_flight = 0", "'max_in_flight' is 0, expected a whole number"),
        ("max_in_flight = true", "'max_in_flight' is True, expected a whole number"),
        ("highest_priority = 0", "'highest_priority' is 0, expected a whole number from 1"),
        ("wieght = 1", "unknown field 'wieght', expected weight, requests_per_minute"),
        ("weight.of = 1", "'weight' is {'of': 1}, expected"),
        (f"weight = 0x{'f' * 5000}", "'weight' is a number of thousands of digits, expected 0, or"),
        (f"burst = [0x{'f' * 5000}]", "'burst' is a number of thousands of digits, expected a"),
    ],
)
def test_a_wrong_member_is_refused_with_its_place(line: str, says: str) -> None:
    with pytest.raises(KeyFileError, match=f"^tenant 'search': {says}"):
        KeyReader().read(f"{KEY}\n[tenants.search]\n{line}\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tenants = 3", "'tenants' is no table of tables, expected .tenants.NAME."),
        ("[[tenants]]", "'tenants' is no table of tables"),
        ("tenants.a = 3", "tenant 'a': found 3, expected a table"),
        (f"tenants.a = 0x{'f' * 5000}", "found a number of thousands of digits, expected a table"),
        ("[tenants.other]", "tenant 'other' is the one of metrics without a table, expected"),
        ('[tenants."a b"]', "tenant 'a b' is 'a b', expected 1 to 64 letters"),
        ("[tenants.a]\n[tenants.b]\n[tenants.a]", "tenant 'a' is there twice"),
        ('[tenants."sk-sluice-A-secret"]\nx = 1', "unknown field 'x'"),
        (
            "".join(f"[tenants.t{each}]\n" for each in range(MOST_TENANTS + 1)),
            "1025 tables .tenants.NAME., expected at most 1024",
        ),
    ],
)
def test_a_wrong_table_is_refused(text: str, says: str) -> None:
    with pytest.raises(KeyFileError, match=says) as refused:
        KeyReader().read(text)
    assert "secret" not in str(refused.value)


def test_the_rules_of_tenants_stay_when_a_key_is_revoked() -> None:
    text = KEY + "# of search\n" + ALL
    assert without_key(text, "ONEONEON") == "# of search\n" + ALL


def test_no_key_is_revoked_with_the_rules_of_a_tenant() -> None:
    with pytest.raises(KeyFileError, match="the lines of key 'ONEONEON' cannot be found"):
        without_key(KEY + '["tenants".search]\nweight = 2\n', "ONEONEON")


def test_the_rules_of_all_tenants_are_replaced_at_once() -> None:
    tenants = Tenants()
    assert not tenants.configured
    assert (tenants.rules("a"), tenants.label("a")) == (NO_RULES, OTHER)
    rules = TenantRules(weight=3.0)
    tenants.replace({"a": rules, "": rules})
    assert tenants.configured
    assert [tenants.rules(each) for each in ("a", "", "b")] == [rules, rules, NO_RULES]
    assert [tenants.label(each) for each in ("a", "", "b")] == ["a", "", OTHER]
