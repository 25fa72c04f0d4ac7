"""Errors written as advice: what was given, why it cannot work, what to write instead.

Each is a `DewError` and also the standard-library class that fits, so that `except ValueError` works too.
"""


class DewError(Exception):
    """Anything dew refuses to do. Its text is for the user; a traceback is not needed to understand it."""


class ConfigError(DewError, ValueError):
    """A setting that cannot work."""


class ShapeError(DewError, ValueError):
    """A tensor whose shape, type or values cannot be what was meant."""


class RewardError(DewError, RuntimeError):
    """A reward function that failed or returned something that is not a reward."""


class EngineError(DewError, RuntimeError):
    """A training engine (TRL, verl) that is missing, of the wrong version, or wrongly set up."""


class RecordError(DewError, ValueError):
    """A file of a run that cannot be read, with what to do about it."""
