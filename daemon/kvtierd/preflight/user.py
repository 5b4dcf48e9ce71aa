"""The user as whom the daemon runs. Root looks at the host as that user."""

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager

from kvtierd.config.daemon import Config
from kvtierd.preflight.processes import PROC, listener


def owner(config: Config) -> pwd.struct_passwd:
    """The user of the daemon that runs with this configuration, or else of its pool's folder. This user, if
    neither exists or this user is not root."""
    uid = os.geteuid()
    if uid != 0:
        return _known(uid)
    file = config.pool.file
    pid = listener(config.server.socket_path)
    for place in (PROC / str(pid) if pid else None, file.parent if file else None):
        if place is not None and place.is_dir():
            return _known(place.stat().st_uid)
    return _known(uid)


def _known(uid: int) -> pwd.struct_passwd:
    try:
        return pwd.getpwuid(uid)
    except KeyError:  # as in a container
        return pwd.struct_passwd((str(uid), "", uid, uid, "", "/", ""))


@contextmanager
def acting_as(user: pwd.struct_passwd) -> Iterator[None]:
    """In this context, the process may do what that user may. Only root can act as another user."""
    if user.pw_uid == os.geteuid():
        yield
        return
    gid, groups = os.getegid(), os.getgroups()
    os.setgroups(os.getgrouplist(user.pw_name, user.pw_gid))
    os.setegid(user.pw_gid)
    os.seteuid(user.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(gid)
        os.setgroups(groups)
