"""A lock on a file that a dead process does not keep, and that works between hosts."""

import errno
import fcntl
import os
from pathlib import Path


def try_lock(path: Path) -> int | None:
    """Create and lock the file `path`; return its open descriptor, or None if it is locked.

    A POSIX record lock: the kernel drops it when its process ends, even by kill -9. Children that
    outlive the process, such as a data loader's workers, do not share it, as they would share one
    of flock. NFS and Lustre carry it between hosts. A process loses it when it closes any
    descriptor of the file. On a file system without locks there is none, and this says so.
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
        print(f"{path}: this file system has no locks: let nothing else write there")
    # The last holder may have removed or renamed the file since it was opened here.
    if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
        return descriptor
    os.close(descriptor)
    return None
