"""The command line: `run` parses and runs it; each other file adds the commands of one part."""

from tundish.cli.run import build_parser, main

__all__ = ["build_parser", "main"]
