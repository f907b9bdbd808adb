"""`install.py` makes .venv of a lock file, with the indexes and certificates of pip's settings."""

import fcntl
import hashlib
import importlib.metadata
import os
import runpy
import shutil
import ssl
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

import install
from tests.certificates import Authority
from tests.serving import ROOT
from tests.wheels import write_wheel

UV = importlib.metadata.version("uv")
LOCKED = (("one", "1.0"), ("uv", UV))
OTHER_HASH = "0" * 64
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "checkout"
version = "1"
[tool.setuptools]
py-modules = []
"""
SECS = 60
NOWHERE = "http://127.0.0.1:9"
"""The discard port, on which nothing listens."""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def index(tmp_path: Path, authority: Authority) -> Iterator[str]:
    """The address of a package index with a certificate of its own."""
    for name, version in LOCKED:
        folder = tmp_path / "index" / name
        write_wheel(folder, name, {f"{name}_module.py": "VALUE = 1\n"}, version)
    handler = partial(Quiet, directory=str(tmp_path / "index"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    issued = authority.issue("localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.cert, issued.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"https://localhost:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a lock of two packages, whose .venv sees the packages of these tests."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    shutil.copy(ROOT / "install.py", folder)
    (folder / "pyproject.toml").write_text(PROJECT)
    write_lock(folder, tmp_path / "hashed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    found = find_spec("uv")
    assert found is not None
    assert found.origin is not None
    (packages(folder) / "shared.pth").write_text(str(Path(found.origin).parents[1]))
    return folder


def write_lock(checkout: Path, wheels: Path) -> None:
    """A lock in the form of ours; each pin has two hashes."""
    text = "# A head.\n\n"
    for name, version in LOCKED:
        wheel = write_wheel(wheels, name, {f"{name}_module.py": "VALUE = 1\n"}, version)
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        hashes = (f" \\\n    --hash=sha256:{each}" for each in (OTHER_HASH, found))
        text += f"{name}=={version}{''.join(hashes)}\n"
    (checkout / "lock").write_text(text)


def packages(checkout: Path) -> Path:
    return next(checkout.glob(".venv/lib/python*/site-packages"))


def environment(home: Path, settings: str) -> Mapping[str, str]:
    """The environment of a user whose pip.conf has those settings of `global`."""
    (home / ".config/pip").mkdir(parents=True, exist_ok=True)
    (home / ".config/pip/pip.conf").write_text(f"[global]\n{settings}\n")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "UV_", "SSL_", "REQUESTS_", "CURL_"))
    }
    # No settings of this machine: an empty folder has none.
    return {**kept, "HOME": str(home), "XDG_CONFIG_DIRS": str(home), "XDG_CONFIG_HOME": ""}


def installing(checkout: Path, user: Mapping[str, str], *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "install.py", "lock", *arguments],
        cwd=checkout,
        env=user,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def installed(checkout: Path, user: Mapping[str, str], *arguments: str) -> tuple[int, str]:
    """The status and the output of an installation."""
    process = installing(checkout, user, *arguments)
    output, _ = process.communicate(timeout=SECS)
    return process.returncode, output


def mirror(index: str, authority: Authority) -> str:
    return f"index-url = {index}\ncert = {authority.root}\nretries = 0"


def test_uv_installs_from_the_index_of_pip_with_its_certificate(
    checkout: Path, tmp_path: Path, index: str, authority: Authority
) -> None:
    user = environment(tmp_path / "home", mirror(index, authority))
    status, output = installed(checkout, user)
    assert status == 0, output
    assert "continuing with pip" not in output
    assert (packages(checkout) / "one-1.0.dist-info/INSTALLER").read_text().strip() == "uv"
    assert (packages(checkout) / "checkout-1.dist-info").is_dir()
    assert output.endswith("setup: done\n")


@pytest.mark.parametrize("value", ["True", pytest.param("y", marks=pytest.mark.release)])
def test_uv_looks_in_no_index_where_pip_looks_in_none(
    checkout: Path, tmp_path: Path, value: str
) -> None:
    for name, version in LOCKED:
        write_wheel(tmp_path / "wheels", name, {f"{name}_module.py": "VALUE = 1\n"}, version)
    folders = f"no-index = {value}\nfind-links = {tmp_path / 'wheels'}"
    user = environment(tmp_path / "home", f"{folders}\nindex-url = {NOWHERE}\nretries = 0")
    status, output = installed(checkout, user)
    assert status == 0, output
    assert (packages(checkout) / "one-1.0.dist-info/INSTALLER").read_text().strip() == "uv"


def test_uv_looks_in_the_folders_of_the_settings_and_of_the_arguments(
    checkout: Path, tmp_path: Path
) -> None:
    (one, version), uv = LOCKED
    write_wheel(tmp_path / "first", one, {"one_module.py": "VALUE = 1\n"}, version)
    write_wheel(tmp_path / "second", uv[0], {"uv_module.py": "VALUE = 1\n"}, uv[1])
    settings = f"no-index = true\nfind-links = {tmp_path / 'first'}"
    user = environment(tmp_path / "home", settings)
    status, output = installed(checkout, user, "--find-links", str(tmp_path / "second"))
    assert status == 0, output
    assert (packages(checkout) / "one-1.0.dist-info/INSTALLER").read_text().strip() == "uv"


def test_an_argument_that_uv_does_not_know_is_for_pip(
    checkout: Path, tmp_path: Path, index: str, authority: Authority
) -> None:
    user = environment(tmp_path / "home", mirror(index, authority))
    status, output = installed(checkout, user, "--no-compile")
    assert status == 0, output
    assert "setup: uv does not know --no-compile; continuing with pip, which is slower" in output
    assert (packages(checkout) / "one-1.0.dist-info/INSTALLER").read_text().strip() == "pip"


@pytest.mark.parametrize(("arguments", "installer"), [((), "uv"), (("--no-compile",), "pip")])
def test_another_environment_is_made_with_uv_or_else_with_pip(
    checkout: Path,
    tmp_path: Path,
    index: str,
    authority: Authority,
    arguments: Sequence[str],
    installer: str,
) -> None:
    user = environment(tmp_path / "home", mirror(index, authority))
    command = [checkout / ".venv/bin/python", "install.py", "--more", "more", "lock", *arguments]
    subprocess.run(command, cwd=checkout, env=user, timeout=SECS, check=True)
    (found,) = checkout.glob("more/lib/python*/site-packages/one-1.0.dist-info/INSTALLER")
    assert found.read_text().strip() == installer
    assert not (packages(checkout) / "one-1.0.dist-info").exists()


def test_a_file_with_another_hash_is_not_installed(checkout: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "hashed"
    write_wheel(wheels, "one", {"one_module.py": "VALUE = 2\n"}, "1.0")
    user = environment(tmp_path / "home", f"no-index = true\nfind-links = {wheels}")
    status, output = installed(checkout, user)
    assert status == 1
    by_uv, _, by_pip = output.partition("setup: uv failed (see above); continuing with pip")
    assert "Hash mismatch" in by_uv
    assert "DO NOT MATCH THE HASHES" in by_pip
    assert not (packages(checkout) / "one_module.py").exists()


def test_without_a_network_the_last_line_says_so_and_the_next_start_continues(
    checkout: Path, tmp_path: Path, index: str, authority: Authority
) -> None:
    nowhere = environment(tmp_path / "home", f"index-url = {NOWHERE}\nretries = 0")
    status, output = installed(checkout, nowhere)
    assert status == 1
    assert output.splitlines()[-1] == (
        "setup: packages could not be installed (see above); the next start continues from here"
    )
    user = environment(tmp_path / "home", mirror(index, authority))
    assert installed(checkout, user)[0] == 0


def test_a_half_installed_package_is_installed_again(
    checkout: Path, tmp_path: Path, index: str, authority: Authority
) -> None:
    user = environment(tmp_path / "home", mirror(index, authority))
    assert installed(checkout, user)[0] == 0
    (packages(checkout) / "one_module.py").unlink()
    (packages(checkout) / "one-1.0.dist-info/INSTALLER").unlink()
    status, output = installed(checkout, user)
    assert status == 0, output
    assert "setup: installing again one-1.0.dist-info" in output
    assert (packages(checkout) / "one_module.py").is_file()


@pytest.mark.parametrize("version", [pytest.param("3 10", marks=pytest.mark.release), "3 14"])
def test_an_environment_of_another_python_is_made_anew(
    checkout: Path, tmp_path: Path, version: str
) -> None:
    python = checkout / ".venv/bin/python"
    python.unlink()
    shown = f'[ "$1" = -c ] && exec echo {version}'
    python.write_text(f'#!/bin/sh\n{shown}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    nowhere = environment(tmp_path / "home", f"index-url = {NOWHERE}\nretries = 0")
    _, output = installed(checkout, nowhere)
    assert output.splitlines()[:2] == [
        f"setup: .venv has Python {version.replace(' ', '.')}, expected 3.11 to 3.13, and is made "
        "anew",
        "setup: making .venv",
    ]
    assert install.version_of(python) == sys.version_info[:2]


def test_an_environment_whose_python_does_not_run_is_made_anew(tmp_path: Path) -> None:
    assert install.version_of(tmp_path / "python") == ()


def test_a_second_setup_waits_for_the_first(
    checkout: Path, tmp_path: Path, index: str, authority: Authority
) -> None:
    user = environment(tmp_path / "home", mirror(index, authority))
    with (checkout / "install.py").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = installing(checkout, user)
        assert process.stdout is not None
        waits = "setup: another setup is running; waiting for its end\n"
        assert process.stdout.readline() == waits
    output, _ = process.communicate(timeout=SECS)
    assert process.returncode == 0, output


def test_another_python_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    version = namedtuple("version", "major minor micro")
    monkeypatch.setattr(sys, "version_info", version(3, 10, 2))
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / "install.py"), run_name="__main__")
    assert str(caught.value).endswith(
        "is Python 3.10, expected 3.11 to 3.13; name one: make serve PYTHON=python3.12"
    )


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 3 << 20))
    with pytest.raises(install.InstallError, match="has 3 MB left; free some and start again"):
        install.refuse_full_disk()


def test_settings_of_the_environment_precede_those_of_files() -> None:
    lines = [
        ":env:.index-url='https://env'",
        "global.index-url='https://global'",
        "global.extra-index-url='https://a\\nhttps://b'",
        "install.timeout='7'",
        "global.timeout='5'",
    ]
    found = install.settings_in(lines)
    assert found["index-url"] == "https://env"
    assert found["timeout"] == "7"
    assert install.uv_environment(found, {"UV_HTTP_TIMEOUT": "9"}) == {
        "UV_DEFAULT_INDEX": "https://env",
        "UV_INDEX": "https://a https://b",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_SYSTEM_CERTS": "true",
        "UV_PYTHON_DOWNLOADS": "never",
    }


def test_arguments_of_pip_are_settings() -> None:
    arguments = ["-i", "https://a", "--find-links=/w", "--find-links", "/v", "--no-index"]
    found = install.settings_of(arguments)
    assert found == {"index-url": "https://a", "find-links": "/w /v", "no-index": "true"}
    assert install.uv_environment(found, {})["UV_FIND_LINKS"] == "/w,/v"
    assert install.settings_of(["--pre"]) is None


def test_arguments_join_the_lists_of_pips_settings_and_replace_other_values() -> None:
    settings = {"extra-index-url": "https://a", "trusted-host": "a\nb", "timeout": "7"}
    given = {"extra-index-url": "https://b", "timeout": "9", "constraint": "c"}
    found = install.uv_environment(install.joined(settings, given), {})
    assert found["UV_INDEX"] == "https://a https://b"
    assert found["UV_INSECURE_HOST"] == "a b"
    assert found["UV_HTTP_TIMEOUT"] == "9"
    assert found["UV_CONSTRAINT"] == "c"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [("--torch-backend", "cpu")]),
        ({"find-links": "/wheels"}, [(), ("--torch-backend", "cpu")]),
        ({"no-index": "ON"}, [(), ("--torch-backend", "cpu")]),
        ({"no-index": "y"}, [(), ("--torch-backend", "cpu")]),
        ({"no-index": "False"}, [("--torch-backend", "cpu")]),
    ],
)
def test_torch_comes_from_the_users_indexes_or_from_its_makers(
    settings: Mapping[str, str], expected: list[tuple[str, ...]]
) -> None:
    assert list(install.attempts(["a==1", "torch==2.13.0+cpu"], settings)) == expected
    assert list(install.attempts(["a==1"], settings)) == [()]
