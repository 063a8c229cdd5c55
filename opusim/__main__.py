"""`python -m opusim` is the command `opusim`."""

from opusim.training.cli import main

if __name__ == "__main__":
    main()
