"""`kvtierctl remote`: what a daemon tells other hosts, asked as a router asks it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import grpc
from google.protobuf.message import Message
from kvtier.v1 import admin_pb2, remote_pb2, remote_pb2_grpc

from kvtierd.core.ids import HASH_BYTES_MAX
from kvtierd.ctl.lists import namespaces as list_namespaces
from kvtierd.ctl.messages import to_json
from kvtierd.ctl.status import page as status_page
from kvtierd.ctl.terminal import show
from kvtierd.ctl.text import count
from kvtierd.rpc.contract import ERROR_METADATA

TIMEOUT_S = 5.0
EXIT_NO_DAEMON = 69
ANSWER_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class _Place:
    """Where to ask, and as whom."""

    address: str
    files: dict[str, Path | None]
    """By option."""
    insecure: bool

    @contextmanager
    def stub(self) -> Iterator[remote_pb2_grpc.RemoteStub]:
        """Gives the daemon's calls. One that fails is explained on standard error, and ends the program."""
        options = (("grpc.max_receive_message_length", ANSWER_BYTES_MAX),)
        try:
            if self.insecure:
                channel = grpc.insecure_channel(self.address, options)
            else:
                read = {option: path.read_bytes() for option, path in self.files.items() if path is not None}
                credentials = grpc.ssl_channel_credentials(read["--ca"], read["--key"], read["--certificate"])
                channel = grpc.secure_channel(self.address, credentials, options)
            with channel:
                yield remote_pb2_grpc.RemoteStub(channel)
        except OSError as error:
            raise click.BadParameter(f"cannot be read: {error}", param_hint="--certificate") from None
        except grpc.RpcError as error:
            click.echo(f"kvtierctl: {self._why(error)}", err=True)
            sys.exit(EXIT_NO_DAEMON)

    def _why(self, error: Any) -> str:
        if any(key == ERROR_METADATA for key, _ in error.trailing_metadata() or ()):
            return str(error.details())
        said = f"{self.address} did not answer: {error.code().name}, {error.details()}"
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            return said
        if self.insecure:
            return f"{said}; does a daemon listen there (remote.listen), with remote.insecure?"
        return (
            f"{said}; does a daemon listen there (remote.listen), does its certificate name this host and "
            "come from --ca, and does its remote.client_ca vouch for --certificate?"
        )


@click.group()
@click.option(
    "--at", "address", required=True, metavar="HOST:PORT", help="Where the daemon's remote.listen is."
)
@click.option("--certificate", type=click.Path(path_type=Path), help="PEM file that says who asks.")
@click.option("--key", type=click.Path(path_type=Path), help="PEM file with the key of --certificate.")
@click.option("--ca", type=click.Path(path_type=Path), help="PEM file with the daemon's authority.")
@click.option("--insecure", is_flag=True, help="Without TLS, for a daemon with remote.insecure.")
@click.pass_context
def remote(
    context: click.Context,
    address: str,
    certificate: Path | None,
    key: Path | None,
    ca: Path | None,
    insecure: bool,
) -> None:
    """Ask a daemon on another host, by TCP with mutual TLS, as routers do. Nothing can be changed there.

    What is shown is what belongs to the tenant that the daemon's server.tenants gives the certificate. Exit
    status: 69 nobody answers there, or the daemon has refused.
    """
    files = {"--certificate": certificate, "--key": key, "--ca": ca}
    missing = [option for option, path in files.items() if path is None]
    if insecure and len(missing) < len(files):
        raise click.UsageError("--insecure takes no certificates: leave it out, or all of them")
    if missing and not insecure:
        raise click.UsageError(f"{missing[0]} is missing: name a PEM file, or ask with --insecure")
    context.obj = _Place(address, files, insecure)


_place = click.make_pass_decorator(_Place)


def _json_option(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option("--json", "as_json", is_flag=True, help=f"Print kvtier.v1.{kind} as JSON.")


@remote.command()
@_json_option("StatusResponse")
@_place
def status(place: _Place, as_json: bool) -> None:
    """Show the pool, the disks and the traffic, and the tenant's engines."""
    with place.stub() as stub:
        response = stub.Status(admin_pb2.StatusRequest(), timeout=TIMEOUT_S)
    _tell(response, as_json, lambda: show(status_page(response)))


@remote.command()
@click.option("--namespace", default="", metavar="DIGEST", help="Its digest, or how it begins; default: all.")
@click.option("--fields", is_flag=True, help="With what engines have said of each.")
@_json_option("ListNamespacesResponse")
@_place
def namespaces(place: _Place, namespace: str, fields: bool, as_json: bool) -> None:
    """List the tenant's namespaces, and how many blocks there are of each."""
    with place.stub() as stub:
        response = _namespaces(stub, namespace)
    if not response.namespaces and not namespace and not as_json:
        click.echo("no engine of this tenant has attached since the daemon started")
        return
    _tell(response, as_json, lambda: show(list_namespaces(response, namespace, fields)))


@remote.command()
@click.argument("hashes", metavar="HASH...", nargs=-1, required=True)
@click.option("--namespace", required=True, metavar="DIGEST", help="Its digest, or how it begins.")
@click.option("--group", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@_json_option("FindResponse")
@_place
def find(place: _Place, hashes: tuple[str, ...], namespace: str, group: int, as_json: bool) -> None:
    """Say which blocks of a prefix the daemon has. HASH is a block's hash in hexadecimal, that of the first
    block first; "-": one a line on standard input, as `python -m kvtier_vllm.hashes` prints them."""
    written = sys.stdin.read().split() if hashes == ("-",) else hashes
    keys = [_hash(each) for each in written]
    with place.stub() as stub:
        digests = {each.namespace_digest for each in _namespaces(stub, namespace).namespaces}
        if len(digests) != 1:
            found = "none begins so" if not digests else f"{len(digests)} begin so"
            raise click.BadParameter(f"{found}: see `kvtierctl remote namespaces`", param_hint="--namespace")
        request = remote_pb2.FindRequest(namespace_digest=digests.pop(), group=group, hashes=b"".join(keys))
        response = stub.Find(request, timeout=TIMEOUT_S)
    _tell(response, as_json, lambda: click.echo(_found(response)))


def _found(response: remote_pb2.FindResponse) -> str:
    asked, leading = len(response.places), response.leading_blocks
    led = response.places[:leading]
    on_host, on_disk = led.count(remote_pb2.BLOCK_PLACE_HOST), led.count(remote_pb2.BLOCK_PLACE_DISK)
    behind = asked - leading - response.places[leading:].count(remote_pb2.BLOCK_PLACE_NONE)
    return (
        f"{leading:,} of {count(asked, 'block')} from the first one on without a gap: {on_host:,} in memory, "
        f"{on_disk:,} on a disk or in the store only; {behind:,} behind the gap"
    )


def _namespaces(stub: remote_pb2_grpc.RemoteStub, namespace: str) -> admin_pb2.ListNamespacesResponse:
    return stub.ListNamespaces(admin_pb2.ListNamespacesRequest(namespace=namespace), timeout=TIMEOUT_S)


def _hash(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if not 1 <= len(key) <= HASH_BYTES_MAX:
        raise click.BadParameter(f"{text[:80]!r} is no block hash in hexadecimal", param_hint="HASH")
    return key


def _tell(response: Message, as_json: bool, show_it: Callable[[], None]) -> None:
    if as_json:
        click.echo(to_json(response))
    else:
        show_it()
