"""A file lock that works between hosts and is released when its owner dies."""

import errno
import fcntl
import os
from pathlib import Path


def try_lock(path: Path) -> int | None:
    """Create and lock the file `path`; return its open descriptor, or None if it is locked.

    A POSIX record lock: the kernel releases it when its process ends, even by kill -9. Unlike
    a flock lock, it is not inherited by child processes, which may outlive their parent (for
    example data loader workers). It works between hosts on NFS and Lustre. Closing any descriptor
    of the file releases it. If the file system does not support locks, warns and continues.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(descriptor)
            return None
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        print(f"{path}: no locks on this file system: do not start another run there")
    # The last owner may have removed or renamed the file since this process opened it.
    if is_at(path, descriptor):
        return descriptor
    os.close(descriptor)
    return None


def is_at(path: Path, descriptor: int) -> bool:
    """Whether `path` refers to the open file `descriptor`."""
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
