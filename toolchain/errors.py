"""The ways a verb may fail, each with its documented exit code.

Promise: whatever goes wrong for a reason outside this code is raised as one of these, and str() of
it is the line a person needs: what, got, expected, and what to do next; of a command that failed
its last lines follow.  toolchain/cli.py prints it and exits with the code; there is no traceback.
Limit: a traceback that does reach the terminal is a bug of this package, not bad input.
"""

import errno
from pathlib import Path


class ArtifactError(Exception):
    """Base of all foreseen failures; never raised itself."""

    exit_code = 1


class Differs(ArtifactError):
    """Something differs from what this artifact expects: a byte, a verdict (exit code 1)."""

    exit_code = 1


class UsageError(ArtifactError):
    """The command line or a configuration value is not of the documented form (exit code 2)."""

    exit_code = 2


class EnvironmentUnfit(ArtifactError):
    """The host lacks something: a namespace, a mirror, disk space, a program (exit code 3)."""

    exit_code = 3


class InvalidData(ArtifactError):
    """Data is broken: a hash, a schema, a truncated file, an invalid run (exit code 4)."""

    exit_code = 4


def cannot_write(
    path: Path, exc: OSError, variable: str | None = "XDG_CACHE_HOME"
) -> EnvironmentUnfit:
    """Return the failure to raise when a file could not be written: the reason and a cure.

    variable: what moves the place, the cache's unless told; None: the command line names the file.
    """
    elsewhere = f"set {variable} to" if variable else "name a file in"
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        cure = f"free some space, or {elsewhere} a directory that has it"
    elif exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        cure = f"make it writable, or {elsewhere} a directory that is"
    else:
        cure = f"see to it, or {elsewhere} another directory"
    return EnvironmentUnfit(
        f"{path}: cannot write: {exc.strerror or exc}; {cure}, and run the same command again"
    )


def cannot_read(path: Path, exc: OSError) -> EnvironmentUnfit:
    """Return the failure to raise when a file that must be there could not be read."""
    return EnvironmentUnfit(
        f"{path}: cannot read: {exc.strerror or exc}; see to it and run the same command again"
    )
