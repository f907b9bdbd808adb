"""The command `python -m gateway`, the same as `sluice`."""

from gateway.cli import main

if __name__ == "__main__":
    main()
