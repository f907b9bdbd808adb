"""Which backends can this environment import?"""

from collections.abc import Iterator, Mapping

from gateway.tools.doctor.finding import Finding, Verdict
from gateway.tools.doctor.packages import RUNTIMES, Versions
from gateway.tools.doctor.probes import Outcome

INSTALL = "install Sluice in this environment: pip install --no-deps -e ., in a checkout"


def findings(outcomes: Mapping[str, Outcome], versions: Versions) -> Iterator[Finding]:
    """A line for each installed backend, by its name, then its facts of this machine."""
    if not outcomes:
        yield Finding("backends", "none is installed", Verdict.BROKEN, INSTALL)
    for name, outcome in outcomes.items():
        yield backend(name, outcome, versions)
        yield from (fact(name, **told) for told in outcome.told.get("facts", ()))


def backend(name: str, outcome: Outcome, versions: Versions) -> Finding:
    """One that cannot be imported is broken if the package that it serves with is installed."""
    if not outcome.error:
        return Finding(name, f"imports in {outcome.secs:.1f} s")
    packages = RUNTIMES.get(name, ())
    there = [package for package in packages if package in versions]
    if packages and not there:
        fix = f"to serve its models: install {' or '.join(packages)}"
        return Finding(name, outcome.error, Verdict.CANNOT, fix)
    slow = "" if outcome.in_time else "--limit-secs N if it is only slow; else "
    return Finding(name, outcome.error, Verdict.BROKEN, f"{slow}{_mend(there)}")


def fact(name: str, what: str, found: str, fix: str) -> Finding:
    """A property of this machine that changes how the backend serves; a limit has a fix."""
    return Finding(f"{name}: {what}", found, Verdict.WARNING if fix else Verdict.OK, fix)


def _mend(packages: list[str]) -> str:
    if not packages:
        return "mend or uninstall the package that the backend comes in"
    return f"pip install --force-reinstall --no-deps {' '.join(packages)}, of a version in range"
