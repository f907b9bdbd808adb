"""Start a worker: `PYTHON FOLDER WORK CONTROL DESCRIPTORS`, the numbers of inherited sockets."""

import sys

from sluice_worker.process import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    # As on Triton a model that reads its command line finds none.
    sys.argv[:] = [""]
    main(arguments)
