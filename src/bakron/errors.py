"""The named errors of bakron: every message says what was expected, what was seen, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class BakronError(Exception):
    """Base class of all errors that bakron raises on purpose; the command line prints it without a traceback."""


class ConfigError(BakronError):
    """A setting is missing, unknown, out of range, or contradicts another one."""


class ShapeError(BakronError):
    """A tensor does not have the shape or symmetry it must have."""


class NonFiniteError(BakronError):
    """A NaN or an infinity was found; the message names the tensor."""


class NotPositiveDefiniteError(BakronError):
    """A Hessian factor could not be factorised even with the largest damping allowed."""


class DataError(BakronError):
    """Calibration or evaluation text is missing, empty, too short or malformed."""


class ModelError(BakronError):
    """A model cannot be loaded, or its structure is not one that bakron can quantize."""


class FormatError(BakronError):
    """A layer or setting cannot be stored in the requested checkpoint format."""


class ResumeError(BakronError):
    """Work found on disk was made with other settings, data or weights; the message names the field."""


class WorkInUseError(BakronError):
    """Another run is writing into the work directory."""


class OutputExistsError(BakronError):
    """The output directory is not empty."""


class DiskSpaceError(BakronError):
    """The disk has less room than the run will need."""


class MemorySpaceError(BakronError):
    """A model takes more memory than is free."""


class MissingExtraError(BakronError):
    """An optional dependency is not installed; the message names the extra to install."""


class VerificationError(BakronError):
    """A checkpoint on disk is not what was solved; the message lists the layers that differ."""


class RankError(BakronError):
    """Another process of a run of several has ended, or cannot be reached."""


class CertificateError(BakronError, ArithmeticError):
    """A kernel returned codes that are not those of the sweep's own definition."""


def require_one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise ConfigError, naming the setting ``name``, unless its ``value`` is among the ``allowed`` ones."""
    if value not in allowed:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(map(str, allowed))}.")
