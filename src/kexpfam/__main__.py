"""``python -m kexpfam`` is the command line."""

from kexpfam.cli import main

main()
