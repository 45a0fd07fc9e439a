"""Errors that a user can cause and fix. The command line prints them as one message, without a traceback.

A message says what was seen, where, why it matters and what to do, with the numbers.
"""


class NestPipeError(Exception):
    """Base of all errors below; anything else that escapes is a defect of nestpipe."""


class ConfigError(NestPipeError):
    """A configuration value is unknown, of the wrong type, or contradicts another."""


class DataError(NestPipeError):
    """A log, sequence folder or batch breaks its contract."""


class CheckpointError(NestPipeError):
    """A checkpoint is incomplete, damaged, or belongs to another run."""


class TrainError(NestPipeError):
    """Training cannot continue, for example because the loss is not finite."""


class PrefixError(NestPipeError):
    """A KV prefix does not belong to a request, which must be scored in full or prefilled again."""


class CommError(NestPipeError):
    """Ranks cannot communicate: one is missing, failed, or runs other code. `ranks` are those at fault, if known."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()):
        super().__init__(message)
        self.ranks = ranks
