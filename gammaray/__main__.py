"""`python -m gammaray` is `gammaray`."""

from gammaray.cli import main

main(prog_name="gammaray")
