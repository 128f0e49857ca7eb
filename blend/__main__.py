"""`python -m blend` is the command line."""

from blend.cli import main

main()
