"""Known vulnerabilities of the pinned versions in some locks, by pip-audit.

    python audit.py PIP_AUDIT LOCK...

The status is 1 for a vulnerability, and for a failure of pip-audit itself. An advisory service that
cannot be reached, or that knows none of the versions, as a mirror, is reported with status 0.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

OPTIONS = ("--progress-spinner=off", "--no-deps", "--disable-pip", "--format=json")
OF_SERVICE = ("requests.exceptions.", "urllib3.exceptions.", "pip_audit._service", "your network")
"""Parts of the errors of pip-audit if its advisory service fails."""
MOST_NAMES = 8


class AuditError(Exception):
    """A failure of pip-audit; `of_service` if it is one of its advisory service."""

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.of_service = any(each in output for each in OF_SERVICE)


def main(arguments: Sequence[str]) -> int:
    """Audit; the status of the process."""
    program, *locks = arguments
    pins = sorted({pin for lock in locks for pin in pins_in(Path(lock).read_text())})
    try:
        packages = [each for some in rounds(pins) for each in audited(program, some)]
    except AuditError as error:
        sys.stderr.write(str(error))
        if error.of_service:
            say(f"the advisory service cannot be reached: none of {len(pins)} versions is audited")
            return 0
        say("pip-audit failed (see above)")
        return 1
    return report(packages)


def pins_in(lock: str) -> Iterator[str]:
    """The pins of a lock without hashes and markers; `1.0+cpu` is a build of the release 1.0."""
    for line in lock.splitlines():
        if "==" in line and not line.startswith("#"):
            yield line.split()[0].partition("+")[0]


def rounds(pins: Sequence[str]) -> Iterator[Sequence[str]]:
    """The pins in groups that have one version of a package each, as pip-audit requires."""
    rest = list(pins)
    while rest:
        first = {pin.partition("==")[0]: pin for pin in rest}
        yield list(first.values())
        rest = [pin for pin in rest if pin not in first.values()]


def audited(program: str, pins: Sequence[str]) -> Sequence[Any]:
    """The packages in pip-audit's report; AuditError without one."""
    with tempfile.TemporaryDirectory() as folder:
        requirements, found = Path(folder, "requirements.txt"), Path(folder, "found.json")
        requirements.write_text("\n".join(pins))
        command = [program, *OPTIONS, f"--output={found}", f"--requirement={requirements}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not found.exists():
            raise AuditError(done.stderr)
        packages: Sequence[Any] = json.loads(found.read_text())["dependencies"]
        return packages


def report(packages: Sequence[Any]) -> int:
    """Print the findings; the status of the process."""
    found = [each for each in packages if each.get("vulns")]
    for package in found:
        for vulnerability in package["vulns"]:
            fixes = ", ".join(vulnerability["fix_versions"]) or "no release"
            name = f"{package['name']}=={package['version']}"
            say(f"{name} has {vulnerability['id']}, fixed in {fixes}")
    unknown = [each["name"] for each in packages if "skip_reason" in each]
    if len(unknown) == len(packages):
        say(f"the advisory service knows none of {len(packages)} versions: none is audited")
        return 0
    say(f"{len(packages) - len(unknown)} versions audited, {len(found)} with vulnerabilities")
    if unknown:
        more = ", ..." if len(unknown) > MOST_NAMES else ""
        say(f"{len(unknown)} versions unknown: {', '.join(unknown[:MOST_NAMES])}{more}")
    return int(bool(found))


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"audit: {text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
