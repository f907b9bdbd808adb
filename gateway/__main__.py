"""`python -m gateway` is the command `sluice`."""

from gateway.cli import main

if __name__ == "__main__":
    main()
