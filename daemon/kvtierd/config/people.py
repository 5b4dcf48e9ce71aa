"""Who a process is, or a caller from another host: the users, groups and certificates that settings name, and
the tenants that they are mapped to."""

import grp
import pwd
import re
from collections.abc import Collection
from dataclasses import dataclass

from kvtierd.config.settings import text
from kvtierd.core.blocks.tenants import TenantShare

FORMS = "user:NAME, uid:N, uid:N-M, group:NAME, gid:N, or * for everybody"
CERTIFICATE, ANONYMOUS = "cert", "anonymous"
UID_TENANT = "uid:"
"""Begins the tenant of a user for whom there is no rule."""
TENANT_CHARACTERS_MAX = 128
ID_MAX = 2**32 - 2
_IDS = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class People:
    """Some users: those with one of these ids, or the members of one of these groups."""

    written: str
    uids: range = range(0)
    gids: range = range(0)

    def include(self, uid: int, groups: Collection[int]) -> bool:
        """Whether a process of this user and these groups is meant."""
        return uid in self.uids or any(gid in self.gids for gid in groups)

    def __str__(self) -> str:
        return self.written


ROOT = People("uid:0", uids=range(1))


@dataclass(frozen=True, slots=True)
class RemoteCaller:
    """A caller from another host: one whose certificate carries this name, or one without a certificate."""

    name: str
    """Empty for callers without a certificate, whom only an insecure port lets in."""

    def include(self, uid: int, groups: Collection[int]) -> bool:
        """False: it is no process of this host."""
        return False

    def __str__(self) -> str:
        return f"{CERTIFICATE}:{self.name}" if self.name else ANONYMOUS


@dataclass(frozen=True, slots=True)
class TenantRule:
    """These people, or this caller, are of this tenant."""

    people: People | RemoteCaller
    tenant: str

    def __str__(self) -> str:
        return f"{self.people}={self.tenant}"


@dataclass(frozen=True, slots=True)
class WrittenShare:
    """This tenant has this share."""

    tenant: str
    share: TenantShare

    def __str__(self) -> str:
        most = f"-{self.share.most:g}" if self.share.most < 1 else ""
        return f"{self.tenant}={self.share.least:g}{most}"


def tenant_of(rules: Collection[TenantRule], uid: int, groups: Collection[int]) -> str:
    """The tenant of a process: that of the first rule that names it, or else its user."""
    found = (rule.tenant for rule in rules if rule.people.include(uid, groups))
    return next(found, f"{UID_TENANT}{uid}")


def tenant_of_remote(rules: Collection[TenantRule], names: Collection[str] | None) -> str | None:
    """The tenant of a caller whose certificate carries these names, or of one that has no certificate
    (`names` is None): that of the first rule that names it. None if no rule does; then it sees nothing."""
    wanted = ("",) if names is None else [name for name in names if name]
    found = (
        rule.tenant for rule in rules if isinstance(rule.people, RemoteCaller) and rule.people.name in wanted
    )
    return next(found, None)


def people(raw: object) -> People:
    """Parses one of FORMS. The users and groups must exist."""
    written = text(raw).strip()
    kind, colon, name = written.partition(":")
    try:
        match kind if colon else written:
            case "*":
                return People(written, uids=range(ID_MAX + 2))
            case "user":
                uid = pwd.getpwnam(name).pw_uid
                return People(written, uids=range(uid, uid + 1))
            case "group":
                gid = grp.getgrnam(name).gr_gid
                return People(written, gids=range(gid, gid + 1))
            case "uid":
                return People(written, uids=_ids(name))
            case "gid":
                return People(written, gids=_ids(name))
            case "cert" | "anonymous":
                raise ValueError(f"{written!r}: callers from other hosts only read; write {FORMS}")
    except KeyError:
        raise ValueError(f"there is no {kind} {name!r}: create it, or name another") from None
    raise ValueError(f"{written!r} names nobody: write {FORMS}")


def everybody_of(raw: object) -> tuple[People, ...]:
    """Parses a list of people, or a text with commas between them; it may be empty."""
    return tuple(map(people, _parts(raw)))


def tenant_rules(raw: object) -> tuple[TenantRule, ...]:
    """Parses a list of rules such as group:research=research, or a text with commas between them."""
    return tuple(map(_tenant_rule, _parts(raw)))


def tenant_shares(raw: object) -> tuple[WrittenShare, ...]:
    """Parses a list of shares such as research=0.5 or batch=0.1-0.3, or a text with commas between them."""
    found = tuple(map(_tenant_share, _parts(raw)))
    tenants = [each.tenant for each in found]
    if twice := [tenant for number, tenant in enumerate(tenants) if tenant in tenants[:number]]:
        raise ValueError(f"{twice[0]} has two shares: write one")
    if (least := sum(each.share.least for each in found)) > 1:
        raise ValueError(f"the tenants are guaranteed {least:g} of everything: lower some, to 1 in all")
    return found


def tenant_names(raw: object) -> tuple[str, ...]:
    """Parses a list of tenants, or a text with commas between them; it may be empty."""
    found = tuple(part.strip() for part in _parts(raw))
    for tenant in found:
        if not tenant or len(tenant) > TENANT_CHARACTERS_MAX:
            raise ValueError(f"{tenant!r}: a tenant has 1 to {TENANT_CHARACTERS_MAX} characters")
        if "=" in tenant:
            raise ValueError(f"{tenant!r} is a rule: write the tenant alone, what is behind the sign")
    return found


def _tenant_share(part: str) -> WrittenShare:
    tenant, equals, share = (each.strip() for each in part.rpartition("="))
    numbers = share.split("-")
    try:
        least, most = float(numbers[0]), float(numbers[1]) if numbers[1:] else 1.0
    except ValueError:
        least, most = 1.0, 0.0
    if not equals or not tenant or len(numbers) > 2 or not 0 <= least <= most <= 1 or not most:
        raise ValueError(
            f"{part!r} is no share: write tenant=LEAST or tenant=LEAST-MOST, fractions from 0 to 1, e.g. "
            "research=0.5 or batch=0.1-0.3"
        )
    return WrittenShare(tenant, TenantShare(least, most))


def _tenant_rule(part: str) -> TenantRule:
    who, equals, tenant = (each.strip() for each in part.partition("="))
    if not equals or not tenant:
        raise ValueError(f"{part!r} is no rule: write who=tenant, e.g. group:research=research")
    if len(tenant) > TENANT_CHARACTERS_MAX:
        raise ValueError(f"a tenant has at most {TENANT_CHARACTERS_MAX} characters")
    if (caller := _remote_caller(who)) is not None:
        if tenant.startswith(UID_TENANT):
            _ids(tenant.removeprefix(UID_TENANT))  # it may see what a user without a rule has
        return TenantRule(caller, tenant)
    if tenant.startswith(UID_TENANT):
        raise ValueError(f"{part!r}: tenants that begin with {UID_TENANT} are those of users without a rule")
    return TenantRule(people(who), tenant)


def _remote_caller(who: str) -> RemoteCaller | None:
    kind, _, name = who.partition(":")
    if kind == CERTIFICATE:
        if not name:
            raise ValueError(f"{who!r} names nobody: write cert:NAME, a name that the certificate carries")
        return RemoteCaller(name)
    return RemoteCaller("") if who == ANONYMOUS else None


def _parts(raw: object) -> list[str]:
    if isinstance(raw, list):
        return [text(part) for part in raw]
    return [part for part in text(raw).split(",") if part.strip()]


def _ids(written: str) -> range:
    found = _IDS.fullmatch(written)
    first = int(found[1]) if found else ID_MAX + 1
    last = int(found[2]) if found and found[2] else first
    if not first <= last <= ID_MAX:
        raise ValueError(f"{written!r} is no id: write a number from 0 to {ID_MAX}, or two as in 1000-1999")
    return range(first, last + 1)
