"""Commands of the README that need nothing but this machine work as they stand there."""

import re
import subprocess
import sys

from tests.serving import ROOT


def test_the_example_of_use_inside_a_program_runs_and_prints_what_it_says() -> None:
    section = (ROOT / "README.md").read_text().partition("## Inside a program")[2]
    section = section.partition("\n## ")[0]
    program = "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    shown = re.findall(r"# prints (.*)", program)
    assert shown
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd=ROOT,
    )
    assert (ended.returncode, ended.stdout.splitlines(), ended.stderr) == (0, shown, "")
