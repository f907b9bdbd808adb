"""Output of commands is reported without the paths of this host."""

import pytest

from backends.python.environment_builds import without_paths


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("ERROR: no such file: '/srv/models/a/1/x.whl'", "ERROR: no such file: 'x.whl'"),
        ("see /home/me/.cache/sluice/.kept/python/", "see "),
        ("Processing ./slow", "Processing ./slow"),
        ("Processing /srv/models/a/slow (from -r a.txt)", "Processing slow (from -r a.txt)"),
        (
            "Looking in indexes: https://me:****@host.org/simple/, file:///srv/index/simple",
            "Looking in indexes: https://me:****@host.org/simple/, simple",
        ),
        ("numpy<2/3 and 1 / 2", "numpy<2/3 and 1 / 2"),
        ("Downloading numpy-2.0.whl (1.2 MB)", "Downloading numpy-2.0.whl (1.2 MB)"),
    ],
)
def test_paths_are_cut_to_their_names_and_addresses_stay(line: str, told: str) -> None:
    assert without_paths(line) == told
