"""The command line: `run` reads it and answers, `plans`, `checkpoints` and `segments` are its commands."""

from tundish.cli.run import build_parser, main

__all__ = ["build_parser", "main"]
