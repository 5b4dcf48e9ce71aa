"""The settings of the KV events that routers read."""

import ipaddress
import re
from dataclasses import dataclass
from functools import partial

from kvtierd.config import settings as s
from kvtierd.config.disk import Refuse
from kvtierd.config.people import TENANT_CHARACTERS_MAX
from kvtierd.core.ids import DiskId
from kvtierd.events.options import PLACEHOLDERS, EventOptions

UNIX, TCP = "ipc://", "tcp://"
EVERYBODY = "*"
UNIX_PATH_BYTES_MAX = 107
REPLAY_BYTES_MIN = 1 << 20
_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\[\]:/]+):(\d{1,5})")


def zmq_endpoint(raw: object) -> str:
    """An address of ZeroMQ that can be bound, or nothing."""
    value = s.text(raw)
    if not value:
        return value
    if value.startswith(UNIX):
        path = value.removeprefix(UNIX)
        if not path.startswith("/") or len(path.encode()) > UNIX_PATH_BYTES_MAX:
            raise ValueError(f"write ipc:// and an absolute path of at most {UNIX_PATH_BYTES_MAX} bytes")
        return value
    match = _TCP.fullmatch(value)
    if match is None or not 0 < int(match[2]) <= 65535:
        raise ValueError("write tcp://ADDRESS:PORT, e.g. tcp://127.0.0.1:5557, or ipc:///PATH")
    if match[1] == "*":
        return value
    try:
        ipaddress.ip_address(match[1].strip("[]"))
    except ValueError:
        raise ValueError(
            "write the address as a number, e.g. tcp://127.0.0.1:5557; * is all of them"
        ) from None
    return value


def topic_template(raw: object) -> str:
    """A topic with placeholders."""
    value = s.text(raw)
    unknown = [name for name in re.findall(r"\{([^}]*)\}", value) if name not in PLACEHOLDERS]
    if unknown or not value:
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise ValueError(f"write a text in which {known} may stand")
    return value


def tenant_names(raw: object) -> tuple[str, ...]:
    """Names of tenants: a list, or a text with commas between them."""
    parts = [s.text(part) for part in raw] if isinstance(raw, list | tuple) else s.text(raw).split(",")
    found = tuple(part.strip() for part in parts if part.strip())
    if any(len(each) > TENANT_CHARACTERS_MAX for each in found):
        raise ValueError(f"a tenant has at most {TENANT_CHARACTERS_MAX} characters")
    return found


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """KV events over ZeroMQ, from which routers learn which blocks this host has."""

    endpoint: str = s.setting(
        "",
        zmq_endpoint,
        "Where events are published: ipc:///PATH, or tcp://ADDRESS:PORT. Empty: nowhere.",
        metavar="ENDPOINT",
    )
    replay_endpoint: str = s.setting(
        "",
        zmq_endpoint,
        "Where subscribers ask for events that they have missed, and for all blocks that are there; written "
        "in the same way. Empty: nowhere.",
        metavar="ENDPOINT",
    )
    tenants: tuple[str, ...] = s.setting(
        (),
        tenant_names,
        "Whose blocks are told of, with commas between them; uid:N is a user without a rule in "
        "server.tenants, and * is everybody. Whoever can reach the endpoint learns of all of them.",
        metavar="TENANT,...",
    )
    topic: str = s.setting(
        "kvtier@{host}@{model}@{namespace}",
        topic_template,
        "The topic of a namespace's events. In it, {host} stands for events.host, {model} for the model's "
        "name, and {namespace} for the namespace's digest. Two namespaces need different topics.",
        metavar="TEXT",
    )
    host: str = s.setting("", s.text, "What {host} stands for. Empty: the name of the host.")
    hash_form: str = s.setting(
        "int",
        s.choice("int", "bytes"),
        "How block hashes are written: int, the last 64 bits as a number, as vLLM does unless it is told "
        "otherwise; bytes, the whole hash.",
        metavar="FORM",
    )
    event_form: str = s.setting(
        "map",
        s.choice("map", "array"),
        "How an event is written: map, as vLLM since June 2026; array, as before, for routers that read only "
        "that.",
        metavar="FORM",
    )
    replay_batches: int = s.setting(
        10_000, s.count, "Batches, of all topics together, that are kept for those who have missed some."
    )
    replay_size: int = s.setting(
        64 << 20, partial(s.size, least=REPLAY_BYTES_MIN), "The most bytes that are kept for that."
    )
    subscriber_queue: int = s.setting(
        10_000, s.count, "Batches that may wait for one subscriber; it loses what comes beyond them."
    )
    heartbeat_s: float = s.setting(
        5.0,
        s.seconds,
        "A topic on which nothing has been published for this long gets a batch without events, so that "
        "subscribers notice what they have missed.",
    )
    insecure: bool = s.setting(
        False,
        s.boolean,
        "Allows endpoints that other hosts can reach. There is no encryption and no password: whoever "
        "reaches the port learns which blocks are there.",
    )

    @property
    def on(self) -> bool:
        return bool(self.endpoint)

    @property
    def everybody(self) -> bool:
        """Whether blocks of all tenants are told of."""
        return EVERYBODY in self.tenants

    def options(self, *, store: DiskId | None) -> EventOptions:
        """`store`: which of what is below the host is the store, if there is one."""
        return EventOptions(
            endpoint=self.endpoint,
            replay_endpoint=self.replay_endpoint,
            topic=self.topic,
            host=self.host,
            replay_batches=self.replay_batches,
            replay_bytes=self.replay_size,
            subscriber_queue=self.subscriber_queue,
            heartbeat_s=self.heartbeat_s,
            whole_hashes=self.hash_form == "bytes",
            positional=self.event_form == "array",
            store=store,
        )


def stays_on_host(endpoint: str) -> bool:
    """Whether nobody on another host can reach an endpoint."""
    match = _TCP.fullmatch(endpoint)
    return match is None or (match[1] != "*" and ipaddress.ip_address(match[1].strip("[]")).is_loopback)


def check_events(events: EventsConfig, refuse: Refuse) -> None:
    """Refuses settings that are wrong only together with others."""
    if not events.on:
        if events.replay_endpoint:
            refuse(
                "events.replay_endpoint",
                events.replay_endpoint,
                "without events there is nothing to replay: set events.endpoint as well, or leave this out",
                "events.endpoint",
            )
        return
    if not events.tenants:
        refuse(
            "events.tenants",
            "",
            "nobody's blocks would be told of: name the tenants whose blocks routers may learn of, or * for "
            "all",
            "events.endpoint",
        )
    if events.endpoint == events.replay_endpoint:
        refuse(
            "events.replay_endpoint",
            events.replay_endpoint,
            "replays need an endpoint of their own: write another one",
            "events.endpoint",
        )
    for name in ("endpoint", "replay_endpoint"):
        value = getattr(events, name)
        if value and not stays_on_host(value) and not events.insecure:
            refuse(
                f"events.{name}",
                value,
                "other hosts could reach this, and anybody there could read along: bind it to loopback or to "
                "a Unix socket; or, if the network is private, set events.insecure",
                "events.insecure",
            )
