"""How stages tell somebody how far they are, without knowing who listens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """A listener: ``start`` a named piece of work of ``total`` steps, ``advance`` it, ``finish`` it."""

    def start(self, label: str, total: int) -> None:
        """A new piece of work begins."""
        ...

    def advance(self, steps: int = 1) -> None:
        """Steps of it are done."""
        ...

    def finish(self) -> None:
        """It is over."""
        ...

    def note(self, message: str) -> None:
        """Something that the user should read."""
        ...


class Silent:
    """Nobody listens."""

    def start(self, label: str, total: int) -> None:
        """Nothing."""

    def advance(self, steps: int = 1) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""

    def note(self, message: str) -> None:
        """Nothing."""


@contextmanager
def stage(progress: Progress, label: str, total: int) -> Iterator[None]:
    """``progress`` between start and finish, also when the stage fails."""
    progress.start(label, total)
    try:
        yield
    finally:
        progress.finish()
