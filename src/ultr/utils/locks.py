"""File locks that the operating system releases when their process ends, even if it is killed."""

from __future__ import annotations


def lock(descriptor: int, *, wait: bool) -> bool:
    """Lock an open file or folder for this process until its descriptor is closed.

    Return False if the operating system or the file system has no locks. Raise BlockingIOError if another process
    holds the lock and `wait` is False.
    """
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True
