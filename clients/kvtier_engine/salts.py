"""Salts from files: command lines and environments can be read by other users, and stand in logs."""

from __future__ import annotations

import os
import stat

from kvtier.layout import TEXT_BYTES_MAX


def read_salt(path: str) -> str:
    """Returns the content of a file without one newline at its end. Raises ValueError, which says what is
    wrong and what to do; it never has the content."""
    if not os.path.isabs(path):
        raise ValueError("write an absolute path")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(
            f"the file cannot be opened ({error.strerror}): name one that this user may read"
        ) from None
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise ValueError("it is not a file: name a file that holds the salt and nothing else")
        if mode & (stat.S_IWGRP | stat.S_IWOTH | stat.S_IROTH):
            raise ValueError(
                f"others may read or change it (mode {stat.S_IMODE(mode):04o}): `chmod 400` it, or 440 for a "
                "group (Kubernetes: the secret volume's defaultMode)"
            )
        content = os.read(fd, TEXT_BYTES_MAX + 2)
    finally:
        os.close(fd)
    try:
        salt = content.decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8: write the salt as text") from None
    if not salt:
        raise ValueError("the file is empty: write the salt into it, or leave the setting out")
    if len(salt.encode()) > TEXT_BYTES_MAX:
        raise ValueError(f"a salt has at most {TEXT_BYTES_MAX:,} bytes: write a shorter one")
    return salt
