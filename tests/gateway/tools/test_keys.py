"""`sluice key`: what it prints, and what it leaves in the file."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.flags.keys import expiry
from gateway.policy.key_file import KeyReader, read_key_file
from gateway.policy.keys import KeyTable, Role

LATER = "2100-01-01T00:00:00Z"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def table(file: Path) -> KeyTable:
    return KeyReader().read(read_key_file(file))


def run(*arguments: object) -> None:
    main(["key", *map(str, arguments)])


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 1
    return capsys.readouterr().err


def new(capsys: pytest.CaptureFixture[str], file: Path, *options: object) -> str:
    run("new", "--file", file, "--tenant", "search", *options)
    printed = capsys.readouterr()
    key = printed.out.removesuffix("\n")
    assert "\n" not in key
    assert key not in printed.err
    return key


def test_a_new_key_is_printed_once_and_stored_as_a_digest(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = new(capsys, file)
    found = table(file).find(key.encode(), 0)
    assert found is not None
    assert (found.tenant, found.roles) == ("search", {Role.INFER})
    secret, _, check = key.split("-", 3)[3].rpartition("-")
    assert (len(secret), len(check)) == (43, 6)
    assert secret not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_options_of_a_key_are_stored(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        *("--role=infer,observe", "--role=admin"),
        f"--expires={LATER}",
        "--note=of Ana",
    )
    key = new(capsys, file, *options)
    found = table(file).find(key.encode(), 0)
    assert found is not None
    assert found.roles == set(Role)
    assert (found.expires, found.note) == (4102444800, "of Ana")


def test_models_of_repeated_options_are_added_up(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = new(capsys, file, "--models=a,b*", "--models=c")
    found = table(file).find(key.encode(), 0)
    assert found is not None
    assert found.models == ("a", "b*", "c")


def test_a_key_is_added_to_what_the_file_has(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = new(capsys, file)
    text = "# ours\n\n" + file.read_text()
    file.write_text(text)
    second = new(capsys, file)
    assert file.read_text().startswith(text)
    assert all(table(file).find(each.encode(), 0) for each in (first, second))


def test_a_revoked_key_is_gone_and_the_others_stay(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [new(capsys, file) for _ in range(3)]
    run("revoke", "--file", file, keys[1].split("-")[2])
    assert [table(file).find(each.encode(), 0) is not None for each in keys] == [True, False, True]
    said = refusal(capsys, "revoke", "--file", file, keys[1].split("-")[2])
    assert f"sluice: --file {file}: it has no key" in said


def test_the_list_has_every_key_and_no_secret(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [
        new(capsys, file, "--note=one"),
        new(capsys, file, "--expires=2020-01-01T00:00:00Z"),
    ]
    with file.open("a") as more:
        more.write('[[certificates]]\nsan = "CN:[bold]a"\ntenant = "web"\n')
    run("list", "--file", file)
    printed = capsys.readouterr().out
    assert "CN:[bold]a" in printed
    assert all(key.split("-")[2] in printed for key in keys)
    assert "one" in printed
    assert "never" in printed
    assert "expired" in printed
    assert all(
        digest.hex() not in printed for digest in (k.digest for k in table(file).keys.values())
    )


def test_the_list_has_the_tenants_with_rules(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    new(capsys, file)
    run("list", "--file", file)
    assert "weight" not in capsys.readouterr().out
    with file.open("a") as more:
        more.write("[tenants.batch]\nweight = 0\ntokens_per_minute = 200_000\n")
    run("list", "--file", file)
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if "batch" in line)
    assert [each.strip() for each in row.split("│")[1:-1]] == [
        *("batch", "0", "", "200000", "", "1", "", "1")
    ]


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--tenant=a b", "'tenant' is 'a b', expected 1 to 64 letters"),
        ("--role=root", "'root': expected some of infer, observe, admin"),
        ("--expires=soon", "'soon' is no time: expected 90d, 12h, 30m, 4w, or a time"),
        ("--expires=2027-01-01", "'2027-01-01' is no time"),
        ("--note=\n", "'note' is"),
    ],
)
def test_a_wrong_option_adds_no_key(
    file: Path, capsys: pytest.CaptureFixture[str], option: str, says: str
) -> None:
    assert says in refusal(capsys, "new", "--file", file, "--tenant=search", option)
    assert not file.exists()


def test_a_file_that_is_wrong_is_not_changed(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("[[keys]\n")
    file.chmod(0o600)
    assert "it is no TOML" in refusal(capsys, "new", "--file", file, "--tenant=search")
    assert file.read_text() == "[[keys]\n"
    missing = file.parent / "absent" / "keys.toml"
    assert "No such file" in refusal(capsys, "new", "--file", missing, "--tenant=search")


@pytest.mark.parametrize(("text", "secs"), [("30m", 1800), ("12h", 43200), ("4w", 2419200)])
def test_a_duration_begins_now(text: str, secs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.5)
    assert expiry(text) == 1001 + secs


def test_keys_that_are_made_at_once_are_all_stored(file: Path) -> None:
    command = [sys.executable, "-m", "gateway", "key", "new", f"--file={file}", "--tenant=search"]
    made = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    keys = [each.communicate()[0].strip() for each in made]
    assert [each.returncode for each in made] == [0] * 4
    assert all(table(file).find(key.encode(), 0) for key in keys)
