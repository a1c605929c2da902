"""What a user names as a file, before it is read."""

import errno
from pathlib import Path


def check_regular(path: Path) -> None:
    """Nothing where the path is of a file, of a folder, or of nothing at all, which its reader tells.

    A device has no end, and a pipe may never begin.

    Raises:
        OSError: it is of something else.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "no regular file", str(path))
