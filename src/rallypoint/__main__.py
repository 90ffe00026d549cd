"""`python -m rallypoint`: the command line."""

from rallypoint.cli import main

__all__: list[str] = []

main(prog_name="rallypoint")
