"""Installs the packages of a lock file into .venv: with uv if that can be had, else with pip.

    python3.11 install.py requirements-laptop.lock [arguments of pip]
    .venv/bin/python install.py --more FOLDER LOCK [arguments of pip]

The second makes another environment, with uv and pip of .venv.
The Makefile calls it with the Python of the new environment. It imports nothing but the standard
library. uv reads none of pip's settings, so they are translated: mirrors, certificates, proxies.
"""

import ast
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

OLDEST, NEWEST = (3, 11), (3, 13)
RANGE = "3.11 to 3.13"
VENV = Path(".venv")
PYTHON = VENV / "bin/python"

MORE = "--more"
LITTLE_DISK = 100 << 20
"""An installation that failed with fewer free bytes failed for lack of them."""

UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "trusted-host": "UV_INSECURE_HOST",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
    "constraint": "UV_CONSTRAINT",
    "keyring-provider": "UV_KEYRING_PROVIDER",
    "no-cache-dir": "UV_NO_CACHE",
}
"""pip's settings, and uv's environment variables of the same meaning."""
NO_INDEX = "no-index"
"""A setting of pip that is an option of uv."""
TRUE = {"y", "yes", "t", "true", "on", "1"}
"""What pip reads as true, in any case."""

CERTIFICATES_OF_PIP = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Environment variables with a file of certificates that pip reads and uv does not."""

SHORT_NAMES = {"-i": "index-url", "-f": "find-links", "-c": "constraint"}
ACCUMULATING = {"extra-index-url", "find-links", "trusted-host", "constraint"}
"""Options of pip that may be given several times."""

SECTIONS = ("global", "install", ":env:")
"""Sections of pip's settings, from the weakest."""


class InstallError(Exception):
    """An installation that cannot continue; the text is one sentence for the user."""


def main(arguments: Sequence[str]) -> int:
    """Install; the status of the process."""
    try:
        if arguments[0] == MORE:
            _, folder, lock, *pip_arguments = arguments
            install_more(Path(folder), Path(lock), pip_arguments)
            return 0
        lock, *pip_arguments = arguments
        with only_one_setup():
            install(Path(lock), pip_arguments)
    except InstallError as error:
        sys.stderr.write(f"setup: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nsetup: interrupted; the next start continues\n")
        return 130
    return 0


def install(lock: Path, pip_arguments: Sequence[str]) -> None:
    """Make the environment and install the packages of a lock file and Sluice itself."""
    dropped = list(drop_half_installed())
    if any(name.startswith("pip-") for name in dropped) or not has_environment():
        make_environment()
    elif dropped:
        say(f"installing again {' '.join(dropped)}")
    pins = pins_in(lock.read_text())
    say(f"installing {len(pins)} packages from {lock}")
    if not install_with_uv(lock, pins, pip_arguments):
        install_with_pip(pins, pip_arguments)
    say("done")


def install_more(folder: Path, lock: Path, pip_arguments: Sequence[str]) -> None:
    """Make an environment in that folder of the packages of a lock; InstallError if that fails."""
    is_made = succeeds(PYTHON, "-m", "venv", "--without-pip", "--clear", folder)
    if not (
        is_made
        and (
            more_with_uv(folder, lock, pip_arguments) or more_with_pip(folder, lock, pip_arguments)
        )
    ):
        raise InstallError(f"{folder} could not be made (see above){disk_full()}")


def more_with_uv(folder: Path, lock: Path, pip_arguments: Sequence[str]) -> bool:
    """Install into another environment; False if uv cannot."""
    given = settings_of(pip_arguments)
    if given is None:
        return False
    uv, environment = uv_command(folder, given)
    return not subprocess.call([*uv, "--quiet", "-r", str(lock)], env=environment)


def more_with_pip(folder: Path, lock: Path, pip_arguments: Sequence[str]) -> bool:
    """Install into another environment; whether that succeeded."""
    pip = (str(PYTHON), "-m", "pip", "--python", str(folder), "--disable-pip-version-check")
    options = ("--quiet", "--no-deps", "--no-compile", *pip_arguments, "-r", str(lock))
    return not subprocess.call([*pip, "install", *options])


def pins_in(lock: str) -> Sequence[str]:
    """The requirements in the text of a lock, each in one line with its hashes."""
    lines = lock.replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if "==" in line and not line.startswith("#")]


@contextmanager
def only_one_setup() -> Iterator[None]:
    """Wait before the block while another setup of this checkout runs."""
    with open(__file__, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another setup is running; waiting for its end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def has_environment() -> bool:
    """Whether .venv has a Python of a version that is served, and a working pip."""
    found = version_of(PYTHON)
    if found and not OLDEST <= found <= NEWEST:
        say(f"{VENV} has Python {found[0]}.{found[1]}, expected {RANGE}, and is made anew")
        return False
    return succeeds(PYTHON, "-m", "pip", "--version")


def version_of(python: Path) -> "tuple[int, ...]":
    """The version of a Python, without the patch; empty if it does not run."""
    printing = "import sys; sys.stdout.write('%d %d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", printing], capture_output=True, text=True, check=False)
    except OSError:
        return ()
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else ()


def make_environment() -> None:
    """Make .venv from nothing."""
    if not succeeds(sys.executable, "-c", "import venv; from ensurepip import version"):
        major, minor = sys.version_info[:2]
        raise InstallError(
            f"'{sys.executable}' cannot make an environment: its module venv or ensurepip is "
            f"missing; on Debian and Ubuntu: apt-get install python{major}.{minor}-venv"
        )
    say(f"making {VENV}")
    if subprocess.call([sys.executable, "-m", "venv", "--clear", str(VENV)]):
        raise InstallError(f"{VENV} could not be made (see above){disk_full()}")


def drop_half_installed() -> Iterator[str]:
    """Forget packages whose installation was interrupted; yields their names.

    pip and uv write INSTALLER after the files of a package, and RECORD after that.
    """
    for folder in sorted(VENV.glob("lib/*/site-packages/*.dist-info")):
        if not ((folder / "INSTALLER").exists() and (folder / "RECORD").exists()):
            yield folder.name
            shutil.rmtree(folder)


def install_with_uv(lock: Path, pins: Sequence[str], pip_arguments: Sequence[str]) -> bool:
    """Install with uv; False, after a sentence about the reason, if that is not possible."""
    given = settings_of(pip_arguments)
    if given is None:
        say(f"uv does not know {' '.join(pip_arguments)}; continuing with pip, which is slower")
        return False
    wanted = [pin for pin in pins if pin.startswith("uv==")]
    if not pip_pins(wanted, "--quiet", *pip_arguments):
        refuse_full_disk()
        say("uv could not be installed (see above); continuing with pip, which is slower")
        return False
    uv, environment = uv_command(VENV, given)
    for attempt in attempts(pins, joined(pip_settings(), given)):
        if not subprocess.call([*uv, *attempt, "-r", str(lock)], env=environment):
            itself = [*uv, "--no-build-isolation", "--quiet", "--editable", "."]
            if not subprocess.call(itself, env=environment):
                return True
        refuse_full_disk()
    say("uv failed (see above); continuing with pip, which is slower")
    return False


def uv_command(folder: Path, given: Mapping[str, str]) -> "tuple[Sequence[str], Mapping[str, str]]":
    """`uv pip install` for an environment, with settings that are given, and its variables."""
    settings = joined(pip_settings(), given)
    uv = (str(PYTHON), "-m", "uv", "pip", "install", "--python", str(folder), "--no-deps")
    no_index = ("--no-index",) if has_no_index(settings) else ()
    return (*uv, *no_index), {**os.environ, **uv_environment(settings, os.environ)}


def attempts(pins: Sequence[str], settings: Mapping[str, str]) -> Sequence[Sequence[str]]:
    """The options of uv to try, one after another.

    The build of Torch for CPUs is on the index of its makers, whose address uv knows. Indexes and
    folders of the user may have it, too.
    """
    of_users, of_makers = (), ("--torch-backend", "cpu")
    if not any(pin.startswith("torch==") for pin in pins):
        return [of_users]
    has_more = settings.keys() & {"index-url", "extra-index-url", "find-links"}
    return [of_users, of_makers] if has_more or has_no_index(settings) else [of_makers]


def has_no_index(settings: Mapping[str, str]) -> bool:
    """Whether pip looks in no index."""
    return settings.get(NO_INDEX, "").lower() in TRUE


def install_with_pip(pins: Sequence[str], pip_arguments: Sequence[str]) -> None:
    """Install with pip; InstallError if that fails."""
    torch = [pin for pin in pins if pin.startswith("torch==")]
    others = [pin for pin in pins if pin not in torch]
    shown = ("--progress-bar", "on", *pip_arguments)
    if torch and not pip_pins(torch, *shown):
        refuse_full_disk()
        raise InstallError(
            f"torch could not be installed (see above)\n"
            f"       If your package indexes have no {torch[0]}: it is on PyTorch's own CPU index. "
            "Take its address from pytorch.org, Get Started (Linux, Pip, CPU), and run\n"
            "       make setup PIP_ARGS='--extra-index-url ADDRESS'"
        )
    itself = ("--no-build-isolation", "--quiet", "--editable", ".")
    if not (pip_pins(others, *shown) and pip(*itself)):
        refuse_full_disk()
        raise InstallError(
            "packages could not be installed (see above); the next start continues from here"
        )


def pip_pins(pins: Sequence[str], *arguments: str) -> bool:
    """Run `pip install` for pins of a lock; if one has hashes, pip requires those of all."""
    with tempfile.NamedTemporaryFile("w", prefix="sluice-", suffix=".txt") as file:
        file.write("\n".join(pins))
        file.flush()
        return pip(*arguments, "-r", file.name)


def pip(*arguments: str) -> bool:
    """Run `pip install`; whether it succeeded."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--no-deps"]
    return not subprocess.call([*command, *arguments])


def pip_settings() -> Mapping[str, str]:
    """pip's settings of its files and environment variables, by their names without a section."""
    command = [str(PYTHON), "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return settings_in(listed.splitlines())


def settings_in(lines: Sequence[str]) -> Mapping[str, str]:
    """The settings in the lines of `pip config list`: `global.index-url='https://...'`."""
    found = {}
    for section in SECTIONS:
        for line in lines:
            name, _, value = line.partition("=")
            if name.startswith(f"{section}."):
                found[name[len(section) + 1 :]] = str(ast.literal_eval(value))
    return found


def settings_of(arguments: Sequence[str]) -> "dict[str, str] | None":
    """The settings in arguments of pip; None if uv has no counterpart of one."""
    found: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        name = SHORT_NAMES.get(option, option[2:] if option.startswith("--") else "")
        if name not in UV_NAMES and name != NO_INDEX:
            return None
        if not equals:
            value = "true" if name.startswith("no-") else rest.pop(0) if rest else ""
        joined = f"{found.get(name, '')} {value}".strip()
        found[name] = joined if name in ACCUMULATING else value
    return found


def joined(settings: Mapping[str, str], given: Mapping[str, str]) -> Mapping[str, str]:
    """pip's settings with those that are given as arguments: lists are joined, as pip does."""
    lists = {
        name: f"{settings[name]} {value}"
        for name, value in given.items()
        if name in ACCUMULATING and name in settings
    }
    return {**settings, **given, **lists}


def uv_environment(settings: Mapping[str, str], present: Mapping[str, str]) -> Mapping[str, str]:
    """uv's environment variables for pip's settings, without those of uv that the user has set."""
    found = {UV_NAMES[name]: value for name, value in settings.items() if name in UV_NAMES}
    for name in {UV_NAMES[each] for each in ACCUMULATING} & found.keys():
        separator = "," if name == "UV_FIND_LINKS" else " "
        found[name] = separator.join(found[name].split())
    if "UV_INDEX" in found:
        # pip takes the best version of all indexes, uv the first index that has the name.
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    bundles = [present[name] for name in CERTIFICATES_OF_PIP if present.get(name)]
    if "SSL_CERT_FILE" not in found and bundles:
        found["SSL_CERT_FILE"] = bundles[0]
    elif "SSL_CERT_FILE" not in found:
        found["UV_SYSTEM_CERTS"] = "true"  # as pip, which trusts the system's certificates
    found["UV_PYTHON_DOWNLOADS"] = "never"
    own = {name for name in present if name.startswith("UV_")}
    return {name: value for name, value in found.items() if name not in own}


def refuse_full_disk() -> None:
    """Raise InstallError if the disk has no room."""
    if reason := disk_full():
        raise InstallError(f"packages could not be installed{reason}")


def disk_full() -> str:
    """A clause about the disk if it is full, else ""."""
    free = shutil.disk_usage(VENV if VENV.exists() else ".").free
    if free > LITTLE_DISK:
        return ""
    return f": the disk of {VENV.absolute()} has {free >> 20} MB left; free some and start again"


def succeeds(*command: "str | Path") -> bool:
    """Whether a command can be run and ends with status 0; its output is dropped."""
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


def say(text: str) -> None:
    """Print a line about the progress."""
    sys.stdout.write(f"setup: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        sys.exit(
            f"setup: '{sys.executable}' is Python {sys.version_info[0]}.{sys.version_info[1]}, "
            f"expected {RANGE}; name one: make serve PYTHON=python3.12"
        )
    sys.exit(main(sys.argv[1:]))
