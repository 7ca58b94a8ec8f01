"""Every error Rollstream raises on purpose, as one tree.

    RollstreamError
    ├── ConfigError (ValueError)            a configuration that cannot run: exit code 2
    ├── RunFolderError (ValueError)         a run folder that is missing, busy or another run's: exit code 2
    ├── MissingExtra (ImportError)          an optional library is not installed: exit code 2
    ├── EnvError (RuntimeError)             an environment broke its contract
    │   ├── UnknownEnv (KeyError)           no environment under that id: exit code 2
    │   └── InfraError                      the world around an episode failed; the episode must not train
    ├── TemplateError (ValueError)          a chat template that cannot be extended token by token: exit code 2
    ├── StreamError (RuntimeError)          the stream between roles
    │   ├── Refused                         the buffer refused a message, with its reason
    │   ├── DeadlineExceeded (TimeoutError) nobody answered in time; names whom we waited for
    │   ├── DiskFull (OSError)              the disk of the stream takes no more; nothing acknowledged is lost
    │   └── Corrupt (ValueError)            stored or received bytes do not match their checksum or schema
    ├── WeightsError (RuntimeError)         pushed weights that do not match their manifest
    │   └── WeightsGone                     a newer version has replaced the one asked for
    ├── DataRefused (ValueError)            a batch that must not train, naming the trajectory
    ├── CheckpointError (RuntimeError)      a checkpoint that is missing or damaged, naming the last good one
    └── RoleFailed (RuntimeError)           a role process ended the run
        └── RankFailed                      another rank of the learner failed, and this one ended with it

Each class is also the standard exception a caller would expect, and pickles. A message gives the value, the bound and
the remedy, in one line.
"""

from __future__ import annotations

import errno

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Corrupt",
    "DataRefused",
    "DeadlineExceeded",
    "DiskFull",
    "EnvError",
    "InfraError",
    "MissingExtra",
    "RankFailed",
    "Refused",
    "RoleFailed",
    "RollstreamError",
    "RunFolderError",
    "StreamError",
    "TemplateError",
    "UnknownEnv",
    "WeightsError",
    "WeightsGone",
]


class RollstreamError(Exception):
    """Base of every error Rollstream raises on purpose.

    ``exit_code`` is what the command line exits with: 2 where the input has to change, 1 where the run failed. ``waits_for_space`` is true where the same can
    be tried again once a disk has room.
    """

    exit_code = 1
    waits_for_space = False

    def __str__(self) -> str:
        return ": ".join(str(argument) for argument in self.args)


class ConfigError(RollstreamError, ValueError):
    """A configuration that cannot run."""

    exit_code = 2


class RunFolderError(RollstreamError, ValueError):
    """A run folder that is missing, in use, or belongs to another run."""

    exit_code = 2


class MissingExtra(RollstreamError, ImportError):
    """An optional library is not installed; the message names the install command."""

    exit_code = 2


class EnvError(RollstreamError, RuntimeError):
    """An environment broke its contract."""


class UnknownEnv(EnvError, KeyError):
    """No environment is registered under that id; the message names the closest ones."""

    exit_code = 2


class InfraError(EnvError):
    """The world around an episode failed (a tool server, a verifier): the episode is counted and never trained."""


class TemplateError(RollstreamError, ValueError):
    """A chat template that cannot be extended token by token."""

    exit_code = 2


class StreamError(RollstreamError, RuntimeError):
    """Something went wrong between the roles."""


class Refused(StreamError):
    """The buffer refused a message.

    Arguments: a code from :class:`rollstream.buffer.wire.RefusalCode`, then the reason in words.
    """

    @property
    def code(self) -> str:
        """The machine-readable reason."""
        return str(self.args[0])


class DeadlineExceeded(StreamError, TimeoutError):
    """Nobody answered in time; the message names whom we waited for and for how long."""


class DiskFull(StreamError, OSError):
    """The disk that holds the stream takes no more; what was acknowledged is on it, what was not is kept until it does."""


class Corrupt(StreamError, ValueError):
    """Bytes that do not match their checksum or their schema."""


class WeightsError(RollstreamError, RuntimeError):
    """Pushed weights that do not match their manifest."""


class WeightsGone(WeightsError):
    """A newer version has replaced the one asked for: poll again."""


class DataRefused(RollstreamError, ValueError):
    """A batch that must not train; the message names the trajectory."""


class CheckpointError(RollstreamError, RuntimeError):
    """A checkpoint that is missing or damaged; the message names the last good one."""


class RoleFailed(RollstreamError, RuntimeError):
    """A role process ended and took the run with it; the message is that role's own error."""


class RankFailed(RoleFailed):
    """Another rank of the learner failed or is gone, and this one cannot go on: the other one's own error says why."""


def describe(error: BaseException) -> str:
    """One line: the message of our own errors, which says all; for others what to do where we know it, else their class and message."""
    text = " ".join(str(error).split())
    if isinstance(error, RollstreamError) and text:
        return text
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full ({error.filename or 'a file of the run'}); free space there, then go on with --resume"
    if type(error).__module__ == "sqlite3":
        return f"the run's ledger.sqlite cannot be used ({text}); put back a copy of it, or start a new run with model.path at checkpoints/vNNNNNN/model"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
