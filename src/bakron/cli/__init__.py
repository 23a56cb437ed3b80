"""The command line; nothing heavy is imported before a command runs."""

from __future__ import annotations

from bakron.cli.commands import app


def main() -> None:
    """The program ``bakron``."""
    app()


__all__ = ["app", "main"]
