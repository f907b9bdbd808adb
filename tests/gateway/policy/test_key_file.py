"""Key files: what is read, what is refused, and what stays of them after a change."""

import fcntl
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gateway.policy import key_file
from gateway.policy.key_file import (
    KeyFileError,
    KeyReader,
    changing_key_file,
    read_key_file,
    text_of_key,
    without_key,
)
from gateway.policy.keys import ApiKey, Role

HASH = "sha256:" + "0f" * 32
ONE = f'[[keys]]\nid = "ONEONEON"\nhash = "{HASH}"\ntenant = "search"\n'
TWO = ONE.replace("ONEONEON", "TWOTWOTW").replace("search", "chat")
HEAD = "# The keys of all.\n"


def with_field(line: str) -> str:
    name = line.split("=")[0].strip()
    return "".join(
        f"{each}\n"
        for each in [*ONE.splitlines(), line]
        if each == line or not each.startswith(name)
    )


def test_keys_are_read() -> None:
    table = KeyReader().read(f"{HEAD}\n{ONE}\n{TWO}")
    assert list(table.keys) == ["ONEONEON", "TWOTWOTW"]
    assert table.keys["ONEONEON"] == ApiKey("ONEONEON", bytes.fromhex("0f" * 32), "search")


def test_every_field_is_read() -> None:
    fields = 'roles = ["infer", "admin"]\nexpires = 2027-01-31T01:00:00+01:00\nnote = "of Ana"\n'
    key = KeyReader().read(ONE + fields).keys["ONEONEON"]
    assert key.roles == {Role.INFER, Role.ADMIN}
    assert key.expires == 1801353600
    assert key.note == "of Ana"


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "keys = []", HEAD])
def test_a_file_may_have_no_key(text: str) -> None:
    assert not KeyReader().read(text).keys


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = = 1", r"it is no TOML: .*line 1, column"),
        (ONE + "x = \n", r"it is no TOML: .*line 5, column"),
        (ONE + ONE, "key 'ONEONEON' is there twice"),
        ("[key]\n", "the file: unknown field 'key', expected keys"),
        ("keys = 3", "'keys' is no list of tables"),
        ("keys = [3]", "key 1 is no table"),
        ("[keys]\n", "'keys' is no list of tables"),
        (with_field("scope = 1"), "key 'ONEONEON': unknown field 'scope', expected id, hash"),
        (with_field('id = "oneoneon"'), "key 1: 'id' is 'oneoneon', expected 8 of A to Z"),
        (with_field("id = 3"), "key 1: 'id' is 3"),
        (with_field(f'hash = "{HASH[:-1]}"'), "'hash' is 'sha256:0f0f.*, expected sha256: and 64"),
        (ONE + "x = " + "1" * 5000, "it is no TOML: "),
        (ONE + "x = " + "[" * 3000, "it is no TOML: "),
        (with_field("expires = 0001-01-01T00:00:00+23:59"), "in the years 1971 to 9998"),
        (with_field("expires = 9999-12-31T23:59:59-23:00"), "in the years 1971 to 9998"),
        (with_field('note = "\u0085"'), "'note' is"),
        (with_field("tenant = 3"), "'tenant' is 3"),
        (with_field('tenant = ""'), "'tenant' is ''"),
        (with_field("roles = []"), r"'roles' is \[\], expected a list with at least one"),
        (with_field('roles = "infer"'), "'roles' is 'infer', expected a list"),
        (with_field('roles = ["root"]'), "'root' is no role, expected infer, observe, admin"),
        (with_field("roles = [[1]]"), r"\[1\] is no role"),
        (with_field("expires = 2027-01-31"), "'expires' is 2027-01-31, expected a time as"),
        (with_field("expires = 2027-01-31T00:00:00"), "'expires' is 2027-01-31 00:00:00, expected"),
        (with_field("note = 3"), "'note' is 3"),
        (ONE.replace("tenant", "# tenant"), "key 'ONEONEON': 'tenant' is missing"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_what_was_expected(text: str, says: str) -> None:
    with pytest.raises(KeyFileError, match=says):
        KeyReader().read(text)
    reader = KeyReader()
    reader.read(ONE)
    with pytest.raises(KeyFileError, match=says):
        reader.read(text)


SECRET = "sk-sluice-7K3QW2MZ-secret-ABCDEF"


@pytest.mark.parametrize(
    "line",
    [f'{name} = "{SECRET}"' for name in ("id", "hash", "roles", "expires", f'"{SECRET}"')]
    + [f'tenant = " {SECRET}"', f'roles = ["{SECRET}"]', f'note = "\\n{SECRET}"'],
)
def test_no_error_shows_a_key_that_stands_in_a_wrong_place(line: str) -> None:
    with pytest.raises(KeyFileError) as refused:
        KeyReader().read(with_field(line))
    assert "secret" not in str(refused.value)


def test_a_known_key_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = KeyReader()
    reader.read(f"{HEAD}\n{ONE}\n{TWO}")
    parsed = []
    loads = tomllib.loads

    def noted(text: str) -> Any:
        parsed.append(text)
        return loads(text)

    monkeypatch.setattr(key_file.tomllib, "loads", noted)
    new = TWO.replace("TWOTWOTW", "NEWNEWNE")
    table = reader.read(f"{HEAD}\n{TWO}\n\n{ONE}\n{new}")
    assert list(table.keys) == ["TWOTWOTW", "ONEONEON", "NEWNEWNE"]
    assert parsed == [HEAD.strip(), new.strip()]


@pytest.mark.parametrize(
    "text", [f"# new\n{ONE}", ONE + 'note = "new"\n', ONE + 'note = """\n[[keys]]"""\n']
)
def test_a_key_whose_rights_have_not_changed_is_the_same(text: str) -> None:
    reader = KeyReader()
    before = reader.read(ONE + "\n" + TWO).keys["ONEONEON"]
    assert reader.read(text).keys["ONEONEON"] is before
    assert reader.read(text + 'roles = ["admin"]\n').keys["ONEONEON"] is not before


def test_a_key_that_is_gone_and_comes_again_is_read() -> None:
    reader = KeyReader()
    assert list(reader.read(ONE).keys) == ["ONEONEON"]
    assert list(reader.read(TWO).keys) == ["TWOTWOTW"]
    assert list(reader.read(ONE + TWO).keys) == ["ONEONEON", "TWOTWOTW"]


def test_a_line_that_looks_like_the_beginning_of_a_key_is_text() -> None:
    text = f'{ONE}note = """a\\\n[[keys]]"""\n\n{TWO}'
    table = KeyReader().read(text)
    assert list(table.keys) == ["ONEONEON", "TWOTWOTW"]
    assert table.keys["ONEONEON"].note == "a[[keys]]"


@pytest.mark.parametrize(
    "key",
    [
        ApiKey("ONEONEON", bytes(32), "search"),
        ApiKey(
            *("ONEONEON", bytes(32), "a.b:c", frozenset(Role), 1801353600.0),
            note='of "Ana" \\ é 😀',
        ),
    ],
)
def test_what_is_written_is_read(key: ApiKey) -> None:
    found = KeyReader().read(text_of_key(key)).keys
    assert found == {"ONEONEON": key}
    assert found["ONEONEON"].note == key.note


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o604, 0o601, 0o650])
def test_a_file_of_too_many_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(ONE)
    file.chmod(mode)
    with pytest.raises(KeyFileError, match=f"mode {mode:04o}.*chmod 640 {file}"):
        read_key_file(file)


@pytest.mark.parametrize("mode", [0o640, 0o600, 0o440, 0o700])
def test_a_file_of_its_owner_and_group_is_read(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(ONE)
    file.chmod(mode)
    assert read_key_file(file) == ONE


def test_a_file_that_is_missing_a_folder_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot be read: No such file"):
        read_key_file(tmp_path / "absent")
    with pytest.raises(KeyFileError, match="cannot be read: Is a directory"):
        read_key_file(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(KeyFileError, match="it is no file"):
        read_key_file(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(KeyFileError, match="no UTF-8"):
        read_key_file(tmp_path / "binary")


def test_a_removed_key_leaves_the_rest_as_it_was() -> None:
    text = f"{HEAD}\n{ONE}\n# of chat\n{TWO}"
    assert without_key(text, "ONEONEON") == f"{HEAD}\n# of chat\n{TWO}"
    assert without_key(text, "TWOTWOTW") == f"{HEAD}\n{ONE}\n# of chat\n"
    assert without_key(ONE, "ONEONEON") == ""


def test_a_key_that_is_not_there_cannot_be_removed() -> None:
    with pytest.raises(KeyFileError, match="it has no key 'TWOTWOTW'"):
        without_key(ONE, "TWOTWOTW")


def test_a_key_within_a_list_is_not_removed_wrongly() -> None:
    text = f'keys = [{{ id = "ONEONEON", hash = "{HASH}", tenant = "search" }}]\n'
    with pytest.raises(KeyFileError, match="remove them by hand"):
        without_key(text, "ONEONEON")


def test_a_file_is_replaced_at_once_behind_its_link_and_keeps_its_mode(tmp_path: Path) -> None:
    file, link = tmp_path / "real" / "keys.toml", tmp_path / "keys.toml"
    file.parent.mkdir()
    file.write_text(ONE)
    file.chmod(0o640)
    link.symlink_to(file)
    before = file.stat().st_ino
    with changing_key_file(link) as replace:
        replace(TWO)
    assert link.is_symlink()
    assert file.read_text() == TWO
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert file.stat().st_ino != before
    assert list(file.parent.iterdir()) == [file]


def test_a_new_file_is_its_owners(tmp_path: Path) -> None:
    with changing_key_file(tmp_path / "keys.toml") as replace:
        replace(ONE)
    assert stat.S_IMODE((tmp_path / "keys.toml").stat().st_mode) == 0o600


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root changes owners")


@needs_root
def test_a_replaced_file_keeps_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(ONE)
    os.chown(file, 1000, 1001)
    with changing_key_file(file) as replace:
        replace(TWO)
    assert (file.stat().st_uid, file.stat().st_gid) == (1000, 1001)


@needs_root
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(ONE)
    file.chmod(0o600)
    os.chown(file, 1000, 1000)
    with pytest.raises(KeyFileError, match="it belongs to user 1000, expected 0 or root"):
        read_key_file(file)


def test_a_folder_that_another_process_locks_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_file, "LOCK_SECS", 0.1)
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        with (
            pytest.raises(KeyFileError, match="another process locks its folder"),
            changing_key_file(tmp_path / "keys.toml"),
        ):
            pass
    finally:
        os.close(other)


def test_a_key_for_some_models_is_read_as_it_is_written() -> None:
    key = ApiKey("ONEONEON", bytes(32), "search", models=("llama", "minilm*"))
    (found,) = KeyReader().read(text_of_key(key)).keys.values()
    assert found == key
    names = ("llama", "llama2", "minilm", "minilm-l6", "other")
    assert [found.caller.sees(name) for name in names] == [True, False, True, True, False]
    assert ApiKey("ONEONEON", bytes(32), "search").caller.sees("other")


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("models = []", "'models' is [], expected a list with at least one text"),
        ('models = "llama"', "'models' is 'llama', expected a list with at least one text"),
        ("models = [1]", "'models': an element is 1, expected a text of 1 to 256 characters"),
        ('roles = ["infer", "admin"]\nmodels = ["a"]', "'models' is for the role infer alone"),
    ],
)
def test_wrong_models_are_refused(lines: str, says: str) -> None:
    with pytest.raises(KeyFileError) as caught:
        KeyReader().read(f"{ONE}{lines}\n")
    assert says in str(caught.value)
