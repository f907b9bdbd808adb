"""The check of all parts that need a GPU: `make gpu-check`, or `--help`.

Imports only the standard library at the top: a missing package is a message, not a traceback.
"""

import importlib
import sys

from loadtests.gpu_check.parts import CORE, PARTS, missing

EXIT_FAILED = 1


def main() -> None:
    """Say what is missing; without what every part needs, end."""
    lacking = missing(dict.fromkeys(need for part in PARTS for need in part.needs))
    if lacking:
        sys.stderr.write(f"gpu_check: not installed: {', '.join(lacking)}\n")
    if needed := missing(CORE):
        sys.stderr.write(
            f"gpu_check: nothing can be checked without {', '.join(needed)}: "
            f"pip install {' '.join(needed)}\n"
        )
        raise SystemExit(EXIT_FAILED)
    importlib.import_module("loadtests.gpu_check.check").main()


if __name__ == "__main__":
    main()
