"""How the program on the board says no: one line, and the host's exit code."""

import errno
import os


class Refused(Exception):
    """What is wrong, in a line; `code` is the exit code the host is to end with."""

    def __init__(self, line: str, code: int = 3) -> None:
        super().__init__(line)
        self.code = code


def why(error: OSError) -> str:
    """The reason and a cure, for a file of the board."""
    cures = {
        errno.ENOSPC: "the disk is full: free some space on the board",
        errno.EDQUOT: "over quota: free some space on the board",
        errno.EROFS: "the file system is read-only: remount it, or set another directory",
        errno.EACCES: "not permitted: give it to the login user, or set another directory",
        errno.EPERM: "not permitted",
    }
    return cures.get(error.errno or 0, os.strerror(error.errno or 0) if error.errno else str(error))
