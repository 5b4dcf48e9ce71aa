"""Runs a command as nobody's child: python detach.py COMMAND [ARGUMENT]...

A parent that ends all its descendants, as vLLM does when it shuts down, does not reach the command: the
process that started it has ended, and init (or the nearest subreaper) has adopted it. It has a session of its
own and no input, and its output goes to the standard error of this program.

Prints "pid NUMBER" once the command runs and, if it ends while somebody still reads, "status NUMBER": its
exit status, or minus the signal that ended it. This program ends when the command has ended, or when nobody
reads any more; the command then runs on. It is a file of its own that imports nothing of ours, because a
process with threads (an engine) must not fork without executing a program, and because it then starts in a
fraction of a second.
"""

import os
import select
import subprocess
import sys


def main() -> None:
    if os.fork():
        os._exit(0)  # the process that is left has no parent that anybody knows
    error = sys.stderr.fileno()
    command = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, stdout=error, stderr=error, start_new_session=True
    )
    reader = sys.stdout.fileno()
    _tell(reader, f"pid {command.pid}")
    poll = select.poll()
    poll.register(os.pidfd_open(command.pid), select.POLLIN)
    poll.register(reader, 0)  # reports even with no events that nobody reads any more
    poll.poll()
    if command.poll() is not None:
        _tell(reader, f"status {command.returncode}")
    os._exit(0)  # does not wait for the command, and prints nothing about it


def _tell(reader: int, line: str) -> None:
    try:
        os.write(reader, f"{line}\n".encode())
    except BrokenPipeError:
        pass  # the process that wanted to know has ended


if __name__ == "__main__":
    main()
