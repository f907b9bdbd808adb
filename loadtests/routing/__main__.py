"""The command `python -m loadtests.routing`, which is `make bench TEST=routing`."""

import argparse
import sys

from loadtests.routing.command import routing

if __name__ == "__main__":
    routing(argparse.ArgumentParser("python -m loadtests routing"), sys.argv[1:])
