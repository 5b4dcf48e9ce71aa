"""Whether the port for other hosts has what TLS takes, and who may see something there."""

from collections.abc import Iterator

from kvtierd.config.certificates import CertificateError
from kvtierd.config.people import ANONYMOUS, CERTIFICATE, RemoteCaller
from kvtierd.preflight.findings import Finding, Situation, Verdict


def check_remote(situation: Situation) -> Iterator[Finding]:
    """Checks the certificate, its key and the authorities, and that there is a rule for somebody."""
    config = situation.config
    remote = config.remote
    if not remote.on:
        return
    if remote.files is None:
        yield Finding(
            "remote TLS",
            Verdict.WARNING,
            "there is none: whoever reaches the port reads what the rule for anonymous shows, and anybody on "
            "the way reads along and may change the answers",
            "set remote.certificate, remote.key and remote.client_ca instead",
            "remote.insecure",
            "true",
        )
    else:
        try:
            remote.files.read()
        except CertificateError as error:
            yield Finding(
                "remote TLS", Verdict.FAILURE, *_parted(str(error)), field=error.field, value=error.path
            )
        else:
            yield Finding("remote TLS", Verdict.OK, f"{remote.files.certificate} and its key can be used")
    callers = [each for each in config.server.tenants if isinstance(each.people, RemoteCaller)]
    admitted = [each for each in callers if (str(each.people) == ANONYMOUS) == remote.insecure]
    if not admitted:
        kind = ANONYMOUS if remote.insecure else f"{CERTIFICATE}:NAME"
        yield Finding(
            "remote callers",
            Verdict.WARNING,
            f"no rule {kind}=TENANT says who may see anything on the remote port: all calls are refused",
            "add one, or set remote.listen to off",
            "server.tenants",
            ",".join(map(str, config.server.tenants)),
        )
    else:
        yield Finding("remote callers", Verdict.OK, ", ".join(map(str, admitted)))


def _parted(text: str) -> tuple[str, str]:
    """What was found, and what to do about it, of an error that says both."""
    found, _, remedy = text.partition(": ")
    return found, remedy
