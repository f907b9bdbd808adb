"""Private folders: one that a killed process has left goes, one in use stays."""

import signal
import subprocess
import sys
from pathlib import Path

from gateway.private_folder import PrivateFolder
from gateway.processes.module_commands import module_environment

WAIT_SECS = 30.0
PREFIX = "sluice-metrics-"

OWNER = """
import sys
from pathlib import Path
from gateway.private_folder import PrivateFolder
found = PrivateFolder.make("sluice-metrics-", Path(sys.argv[1]))
(found.path / "values.db").write_bytes(b"1")
print(found.path, flush=True)
sys.stdin.read()
"""


def owner(parent: Path) -> tuple["subprocess.Popen[str]", Path]:
    """A process with a folder, which it keeps until it is killed or its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=module_environment(),
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_new_and_goes_with_what_is_in_it(tmp_path: Path) -> None:
    found = PrivateFolder.make(PREFIX, tmp_path)
    (found.path / "requests").write_bytes(b"1")
    assert found.path.parent == tmp_path
    found.remove()
    found.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_process_goes_and_those_in_use_stay(tmp_path: Path) -> None:
    killed, left = owner(tmp_path)
    lives, used = owner(tmp_path)
    with killed, lives:
        killed.send_signal(signal.SIGKILL)
        killed.wait(WAIT_SECS)
        assert left.exists()
        mine = PrivateFolder.make(PREFIX, tmp_path)
        found = set(tmp_path.iterdir())
        mine.remove()
        lives.kill()
    assert found == {used, mine.path}
    PrivateFolder.make(PREFIX, tmp_path).remove()
    assert list(tmp_path.iterdir()) == []


def test_other_folders_and_links_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "file").write_bytes(b"1")
    link = tmp_path / "sluice-metrics-link"
    link.symlink_to(other)
    PrivateFolder.make(PREFIX, tmp_path).remove()
    assert (other / "file").read_bytes() == b"1"
    assert link.is_symlink()
