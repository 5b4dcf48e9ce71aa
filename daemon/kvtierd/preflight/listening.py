"""Whether the daemon can listen at its sockets, and at the TCP ports for metrics, health checks and other
hosts."""

import errno
import grp
import os
import socket
import stat
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from kvtierd.config.daemon import SOCKET_NAME, Config
from kvtierd.config.settings import declared
from kvtierd.preflight.findings import Finding, RunningDaemon, Situation, Verdict, in_use_by
from kvtierd.preflight.places import private_folder, usable
from kvtierd.preflight.processes import described, listener, port_owners

OFF = "off"
ANSWER_S = 5.0
NAMES = {
    "metrics.listen": "metrics port",
    "server.health_listen": "health port",
    "remote.listen": "remote port",
}


def daemon_at(path: Path) -> RunningDaemon | None:
    """The daemon that listens at a socket; None if there is none."""
    pid = listener(path)
    return None if pid is None else RunningDaemon(pid or None)


def check_sockets(situation: Situation) -> Iterator[Finding]:
    """Checks the sockets' folder, the files in it, who listens there, and the group that may use them."""
    server = situation.config.server

    def failure(name: str, found: str, remedy: str) -> Finding:
        return Finding(name, Verdict.FAILURE, found, remedy, "server.socket", server.socket_path)

    if (trouble := private_folder(server.socket_path.parent)) is not None:
        yield failure("socket folder", trouble.found, trouble.remedy)
    else:
        yield Finding("socket folder", Verdict.OK, usable(server.socket_path.parent))
        for path in (server.socket_path, server.side_socket_path):
            if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
                in_it = f"name a file in it, {path / SOCKET_NAME}"
                remedy = in_it if path.is_dir() else "remove it, or use another path"
                yield failure("socket file", f"{path} is in the way and no socket", remedy)
        yield from _check_daemon(situation)
    yield from _check_group(server.group)


def _check_daemon(situation: Situation) -> Iterator[Finding]:
    path, daemon = situation.config.server.socket_path, situation.daemon
    if daemon is None:
        yield Finding("daemon", Verdict.OK, f"none runs at {path}")
        return
    who = f"pid {daemon.pid}" if daemon.pid else "another process"
    if not _answers(path):
        pid = daemon.pid or "PID"
        yield Finding(
            "daemon",
            Verdict.FAILURE,
            f"{who} listens at {path}, but does not answer in {ANSWER_S:g} s",
            f"if it was stopped, kill -CONT {pid}; else see its log (journalctl -u kvtierd), then kill -KILL "
            f"{pid} and start it again: it finds its pool as it was",
            "server.socket",
            path,
            passing=True,
        )
        return
    if situation.may_run:
        yield Finding("daemon", Verdict.OK, f"one runs at {path}: {who}")
        return
    remedy = "stop it, or give this one another socket (--socket) and pool (--pool-path)"
    yield Finding(
        "daemon",
        Verdict.FAILURE,
        f"already running: {who} owns {path}",
        remedy,
        "server.socket",
        path,
        passing=True,
    )


def _answers(path: Path) -> bool:
    """Whether the process that listens at a socket answers as kvtierd does; a refusal is an answer too."""
    # Imported late: a start where nobody listens yet has no use for it here.
    import grpc
    from kvtier.v1 import admin_pb2, admin_pb2_grpc

    with grpc.insecure_channel(f"unix:{path}") as channel:
        try:
            admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=ANSWER_S)
        except grpc.RpcError as error:
            return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return True


def _check_group(group: str) -> Iterator[Finding]:
    if not group:
        return
    try:
        members = grp.getgrnam(group).gr_mem
    except KeyError:
        remedy = f"create it (systemd-sysusers, groupadd --system {group}), or leave it empty"
        yield Finding(
            "socket group", Verdict.FAILURE, "there is no such group", remedy, "server.group", group
        )
        return
    gid = grp.getgrnam(group).gr_gid
    if os.geteuid() != 0 and gid not in (os.getegid(), *os.getgroups()):
        found = f"uid {os.geteuid()} is not a member of it, and cannot give it the sockets"
        remedy = f"usermod -a -G {group} the daemon's user, or name a group that it is in"
        yield Finding("socket group", Verdict.FAILURE, found, remedy, "server.group", group)
        return
    yield Finding("socket group", Verdict.OK, f"{group}: {', '.join(members) or 'no members listed'}")


def check_ports(situation: Situation) -> Iterator[Finding]:
    """Checks that the addresses of metrics, health checks and the remote port can be bound, and differ."""
    config = situation.config
    wanted = {
        "metrics.listen": config.metrics.listen,
        "server.health_listen": config.server.health_listen,
        "remote.listen": config.remote.listen,
    }
    listening = {field: listen for field, listen in wanted.items() if listen != OFF}
    for field, listen in listening.items():
        yield _check_port(situation, NAMES[field], field, listen)
    for first, second in combinations(listening, 2):
        ports = {listening[field].rpartition(":")[2] for field in (first, second)}
        if len(ports) == 1 and ports != {"0"} and _overlap(listening[first], listening[second]):
            yield Finding(
                NAMES[second],
                Verdict.FAILURE,
                f"{first} has the same port",
                "choose another port for one of them",
                second,
                wanted[second],
            )


def _overlap(first: str, second: str) -> bool:
    hosts = {listen.rpartition(":")[0].strip("[]") for listen in (first, second)}
    return len(hosts) == 1 or bool(hosts & {"0.0.0.0", "::"})


def _ways_to_choose(field: str, host: str) -> str:
    item = next(each for each in declared(Config) if each.key == field)
    return f'{item.flag}, {item.env} or {field} = "{host}:PORT"'


def _check_port(situation: Situation, name: str, field: str, listen: str) -> Finding:
    host, _, port = listen.rpartition(":")

    def failure(found: str, remedy: str, *, passing: bool = False, holder: bool = False) -> Finding:
        return Finding(name, Verdict.FAILURE, found, remedy, field, listen, passing=passing, holder=holder)

    try:
        family, *_, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        code = getattr(error, "errno", None)
        if code == errno.EADDRINUSE:
            pids = port_owners(int(port))
            said = f"port {port} is {in_use_by(pids, described(pids))}"
            if situation.is_of_daemon(pids):
                return Finding(name, Verdict.OK, said)
            choose = _ways_to_choose(field, host)
            if situation.loaded.may_move_metrics and field == "metrics.listen":
                found = f"{said}: metrics are served on a free port, which `kvtierctl status` shows"
                return Finding(
                    name, Verdict.WARNING, found, f"choose another one with {choose}", field, listen
                )
            remedy = f"end that process, or choose another port, 0 for a free one, or off with {choose}"
            return failure(f"cannot be bound: {said}", remedy, passing=True, holder=True)
        if code == errno.EACCES and int(port) < 1024:
            found = f"cannot be bound: ports below 1024 are root's, and this daemon runs as {os.geteuid()}"
            return failure(found, "choose a port from 1024 on, or give the daemon CAP_NET_BIND_SERVICE")
        if code == errno.EADDRNOTAVAIL:
            found = "cannot be bound: this host does not have the address"
            return failure(found, "write one that it has, 127.0.0.1, 0.0.0.0 for all of them, or off")
        why = getattr(error, "strerror", None) or error
        return failure(f"cannot be bound ({why})", "write another address, or off")
    return Finding(name, Verdict.OK, f"{listen} can be bound")
