"""Every error a user can cause, and what the command line answers.

VlarlError                   exit code
├── ConfigError              2   a preset, key or value is wrong; nothing started
│   └── SpecMismatch         2   policy and env disagree about actions, cameras or state
├── MissingError             3   something has to be installed or downloaded; `fix` is the command
│   ├── AssetMissing
│   ├── ExtraMissing
│   └── DeviceMissing
└── RunFailed                1   the run started and could not go on
    ├── NonFiniteLoss
    ├── NothingToLearn
    ├── WorkerDied
    ├── CorruptFile
    └── DownloadFailed

A message says what, where, got, expected, and what to do next.
"""

from __future__ import annotations


class VlarlError(Exception):
    """Base of all errors that are shown to the user without a traceback."""

    exit_code = 1


class ConfigError(VlarlError):
    """A preset, key, value or argument is wrong. Nothing was started."""

    exit_code = 2


class SpecMismatch(ConfigError):
    """Policy and env disagree (action width, cameras, state, chunk)."""


class MissingError(VlarlError):
    """Something is not installed or not downloaded.

    fix: the command that gets it.
    """

    exit_code = 3

    def __init__(self, message: str, *, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


class AssetMissing(MissingError):
    """A checkpoint, data set or other file is not on this machine."""


class ExtraMissing(MissingError):
    """An optional Python package is not installed."""


class DeviceMissing(MissingError):
    """No usable GPU, GL driver or other device."""


class RunFailed(VlarlError):
    """The run started and could not go on."""


class NonFiniteLoss(RunFailed):
    """Loss or gradient became NaN or infinite."""


class NothingToLearn(RunFailed):
    """No episode carried a learning signal for too many iterations in a row."""


class WorkerDied(RunFailed):
    """A simulator process died or hung and a restart did not help."""


class CorruptFile(RunFailed):
    """A file on disk is truncated, of another format, or unsafe to load."""


class DownloadFailed(RunFailed):
    """The hub refused, or sent something else than it promised."""


def rebuilt(kind: str, message: str, fix: str | None = None) -> VlarlError | None:
    """The error of that class name, as if it had happened in this process.

    None when `kind` is no error of this module. fix: of a MissingError.
    """
    known = globals().get(kind)
    if not (isinstance(known, type) and issubclass(known, VlarlError)):
        return None
    return known(message, fix=fix or "") if issubclass(known, MissingError) else known(message)
