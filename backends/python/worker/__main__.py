"""Start a worker: `PYTHON FOLDER WORK CONTROL DESCRIPTORS`, the numbers of inherited sockets."""

import sys

from sluice_worker.process import main

if __name__ == "__main__":
    main(sys.argv[1:])
