"""What `kvtierctl` prints for people."""

import math
from collections.abc import Iterable, Iterator, Mapping

from kvtier.v1 import admin_pb2

from kvtierd.config.settings import human_size, size_and_parts

CPU = "cpu"
"""What a StatusResponse calls the device that is the host itself."""
DISK_PREFIX = "disk-"
"""And how those of disks begin."""


def lines(status: admin_pb2.StatusResponse) -> Iterator[str]:
    """The status for people."""
    pool, blocks, counters = status.pool, status.blocks, status.counters
    yield f"kvtierd {status.version}  {status.state}  pid {status.pid}  up {duration(status.uptime_s)}"
    yield f"  socket     {status.socket}"
    yield f"  metrics    {status.metrics_url or 'off'}"
    yield ""
    share = pool.used_bytes / pool.capacity_bytes if pool.capacity_bytes else 0.0
    yield f"Pool         {pool.path or 'anonymous memory'}"
    if pool.size_bytes:  # else the daemon is an older one
        yield f"  size       {size_and_parts(pool.size_bytes, pool.file_bytes, pool.capacity_bytes)}"
    yield (
        f"  used       {bar(share)} {share:4.0%}  "
        f"{human_size(pool.used_bytes)} of {human_size(pool.capacity_bytes)}"
    )
    yield f"  blocks     {blocks.ready:,} ready, {blocks.writing:,} writing, {blocks.evicting:,} evicting"
    yield f"  extents    {pool.extents - pool.extents_free:,} assigned, {pool.extents_free:,} free"
    if pool.start == "warm":
        found = f"{pool.recovered_blocks:,} blocks, {human_size(pool.recovered_bytes)}"
        yield (
            f"  start      warm: {found} found in {pool.recovery_s:.2f} s, "
            f"{count(pool.discarded_slots, 'slot')} discarded"
        )
    else:
        yield f"  start      cold: {pool.cold_reason}"
    if pool.quarantined_slots:
        yield f"  quarantine {count(pool.quarantined_slots, 'slot')}: their writers are not proved gone yet"
    yield from _integrity(status)
    yield from _disks(status)
    yield ""
    hit_rate = counters.lookup_hits / counters.lookup_hashes if counters.lookup_hashes else 0.0
    yield "Traffic      since the start"
    yield (
        f"  lookups    {counters.lookups:,} of {counters.lookup_hashes:,} blocks, "
        f"{counters.lookup_hits:,} hit ({hit_rate:.1%})"
    )
    yield (
        f"  stored     {counters.stored_blocks:,} blocks, {human_size(counters.stored_bytes)}"
        f" (+ {counters.deduplicated_blocks:,} there already, {counters.throttled_blocks:,} refused for room)"
    )
    yield f"  loaded     {counters.loaded_blocks:,} blocks, {human_size(counters.loaded_bytes)}"
    unwritten = (
        f", {counters.evicted_unwritten_blocks:,} of them not written to a disk" if status.disks else ""
    )
    yield f"  evicted    {counters.evicted_blocks:,} blocks{unwritten}"
    if status.disks:
        yield (
            f"  promoted   {counters.promoted_blocks:,} blocks, {human_size(counters.promoted_bytes)}; "
            f"{counters.recompute_blocks:,} reported as misses because computing them is faster"
        )
    yield (
        f"  transfers  {status.transfers_active:,} active, {counters.failed_transfers:,} failed, "
        f"{counters.cancelled_transfers:,} cancelled"
    )
    yield (
        f"  leases     {status.leases:,} on {status.leased_blocks:,} blocks, "
        f"{counters.expired_leases:,} expired"
    )
    if counters.refused_leases:
        yield (
            f"             {counters.refused_leases:,} lookups found more than they could lease: "
            f"{counters.missed_lease_limit:,} blocks; the pool is small for such prompts (pool.size)"
        )
    if counters.integrity_failures:
        by = status.integrity
        yield (
            f"  CORRUPT    {counters.integrity_failures:,} blocks failed their check and were not served: "
            f"{by.found_on_load:,} before a load, {by.found_after_restart:,} after a restart, "
            f"{by.found_in_sample:,} by sampling"
        )
    if counters.audits:
        yield (
            f"  audits     {counters.audits:,} blocks computed by engines that could have loaded them: "
            f"{counters.audit_mismatches:,} were not what was stored"
        )
    yield ""
    yield from _engines(status)
    yield ""
    yield from _workers(status)


def _integrity(status: admin_pb2.StatusResponse) -> Iterator[str]:
    """What sampling can be expected to find, and no more than that."""
    integrity = status.integrity
    when = "before every load" if integrity.verify == "always" else "before its first load after a restart"
    yield f"  verify     by record on every load; a block's data {when}"
    if integrity.sample_bytes_per_s:
        yield (
            f"  sampling   {human_size(integrity.sample_bytes_per_s)}/s at most: a block that has rotted is "
            f"found after {duration(max(1, math.ceil(integrity.expected_detection_s)))}"
        )
        yield (
            "             on average, longer while blocks are copied; until then a load can be given it"
            if integrity.verify != "always"
            else "             on average, longer while blocks are copied"
        )
        yield (
            f"             {count(integrity.sampled_slots, 'slot')}, {human_size(integrity.sampled_bytes)} "
            "compared so far"
        )
    else:
        yield "  sampling   off"
    if integrity.corrupt_slots:
        yield (
            f"  corrupt    {count(integrity.corrupt_slots, 'slot')} set aside: their memory has failed a "
            "check, and comes back with a cold start"
        )


def _disks(status: admin_pb2.StatusResponse) -> Iterator[str]:
    """Each disk: what it holds, what it does, and what is wrong with it."""
    pids = {worker.device: worker.pid for worker in status.workers}
    for number, disk in enumerate(status.disks):
        share = disk.used_bytes / disk.capacity_bytes if disk.capacity_bytes else 0.0
        yield ""
        yield f"Disk         {disk.path}  {disk.state}{f': {disk.why}' if disk.why else ''}"
        yield (
            f"  used       {bar(share)} {share:4.0%}  {human_size(disk.used_bytes)} of "
            f"{human_size(disk.capacity_bytes)}, {count(disk.blocks, 'block')}"
        )
        if disk.state != "starting":
            found = f"{count(disk.recovered_blocks, 'block')}, {human_size(disk.recovered_bytes)} found"
            yield f"  start      {f'cold: {disk.cold_reason}' if disk.cold_reason else f'warm: {found}'}"
        yield (
            f"  written    {disk.written_blocks:,} blocks, {human_size(disk.written_bytes)}, "
            f"{human_size(disk.writing_bytes)} on their way{_rate(disk.write_bytes_per_s)}"
        )
        yield (
            f"  read       {disk.read_blocks:,} blocks, {human_size(disk.read_bytes)}, "
            f"{human_size(disk.reading_bytes)} on their way{_rate(disk.read_bytes_per_s)}"
        )
        yield f"  evicted    {disk.evicted_blocks:,} blocks"
        worker = pids.get(f"{DISK_PREFIX}{number}")
        cached = "" if disk.direct_io or not worker else ", without O_DIRECT"
        yield f"  worker     {f'pid {worker}{cached}' if worker else 'none'}, {count(disk.errors, 'error')}"
        if disk.scrubbed_blocks < disk.scrub_blocks:
            yield f"  scrub      {scrub_line(disk)}"
        if disk.corrupt_blocks or disk.corrupt_slots:
            yield (
                f"  CORRUPT    {count(disk.corrupt_blocks, 'block')} did not match and were not served, "
                f"{count(disk.corrupt_slots, 'slot')} set aside"
            )


def _rate(bytes_per_s: float) -> str:
    return f", {human_size(bytes_per_s)}/s lately" if bytes_per_s else ""


def scrub_line(disk: admin_pb2.DiskStatus) -> str:
    """How far a scrub is."""
    share = disk.scrubbed_blocks / disk.scrub_blocks if disk.scrub_blocks else 1.0
    return (
        f"{disk.path}: {disk.scrubbed_blocks:,} of {count(disk.scrub_blocks, 'block')} compared, {share:.0%}"
    )


def scrubbed(disks: Iterable[admin_pb2.DiskStatus], corrupt: Mapping[str, int]) -> Iterator[str]:
    """How a scrub ended; `corrupt`: blocks that it found, by path."""
    for disk in disks:
        if disk.state != "live":
            yield f"{disk.path}: not looked at, {disk.state}{f': {disk.why}' if disk.why else ''}"
            continue
        how = "" if disk.scrubbed_blocks >= disk.scrub_blocks else "; it goes on"
        bad = f"{count(corrupt[disk.path], 'block')} CORRUPT" if corrupt[disk.path] else "none corrupt"
        yield f"{scrub_line(disk)}, {bad}{how}"


def _engines(status: admin_pb2.StatusResponse) -> Iterator[str]:
    if not status.instances:
        yield "Engines      none attached"
        return
    yield "Engines"
    for instance in status.instances:
        state = "ready" if instance.ready else "incomplete" if instance.sessions else "ending"
        yield (
            f"  {instance.instance}  {state}  {instance.model}  world size {instance.world_size}, "
            f"{human_size(instance.mapped_bytes)} mapped, {instance.transfers_active:,} transfers, "
            f"{instance.leased_blocks:,} blocks leased"
        )
        for session in instance.sessions:
            attached = duration(session.attached_s)
            yield f"    {session.role:<21} pid {session.pid:<8} {attached:>8}  {session.client}"


def _workers(status: admin_pb2.StatusResponse) -> Iterator[str]:
    yield "Copy workers"
    workers = [worker for worker in status.workers if not worker.device.startswith(DISK_PREFIX)]
    width = max((len(worker.device) for worker in workers), default=0)
    for worker in workers:
        registered = f", {human_size(worker.registered_bytes)} of the pool registered"
        yield (
            f"  {worker.device:<{width}}  {worker.state:<8} pid {worker.pid}, "
            f"{human_size(worker.mapped_bytes)} mapped{registered if worker.device != CPU else ''}, "
            f"{worker.parts_active:,} parts active, replaced {worker.respawns:,} times"
        )


def bar(share: float, width: int = 20) -> str:
    full = min(width, round(share * width))
    return "█" * full + "░" * (width - full)


def duration(seconds: float) -> str:
    """3 s, 12 min 5 s, 2 h 4 min, 3 d 1 h."""
    whole = int(seconds)
    units = (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))
    for name, size, lesser, lesser_size in units:
        if whole >= size:
            return f"{whole // size} {name} {whole % size // lesser_size} {lesser}"
    return f"{whole} s"


def explained(response: admin_pb2.ExplainResponse) -> Iterator[str]:
    """An explanation for people."""
    for each in response.explanations:
        yield f"namespace {each.namespace_digest}  {each.model or 'of an earlier daemon'}  group {each.group}"
        yield f"  {each.text}"
        for other in each.elsewhere:
            name = f"{other.namespace_digest}, group {other.group}"
            if not other.differences:
                yield f"  in {name}: what it was made of is not known any more"
                continue
            yield f"  in {name}, which differs in"
            for difference in other.differences:
                yield f"    {difference.field}: {_values(difference)}"
    if response.explanations:
        return
    if response.known_namespaces:
        yield "no namespace that was asked about has such a group; `kvtierctl namespaces` lists all groups"
        return
    ago = duration(response.uptime_s)
    yield f"no engine has attached since the daemon started {ago} ago, and nothing is stored"
    yield "  `kvtierctl engines` lists the engines that are attached, with those of which ranks are missing;"
    yield "  `kvtierctl status` says what the pool holds, and how the daemon started"


def _values(difference: admin_pb2.Difference) -> str:
    if not difference.here and not difference.there:
        return "(not shown)"
    return f"{difference.here or 'none'} here, {difference.there or 'none'} there"


def drained(progress: admin_pb2.DrainProgress) -> Iterator[str]:
    """How a drain ended, for people, and what to do next."""
    kept = f"{count(progress.kept_blocks, 'block')}, {human_size(progress.kept_bytes)}"
    match progress.state:
        case "stopping":
            yield f"kvtierd, pid {progress.pid}, has stopped; everything accepted was committed"
            yield f"  kept   {kept}, in {progress.pool_path}"
            yield f"  start  {progress.start_again}"
            yield "         with the same configuration file and environment; engines attach by themselves"
        case "drained":
            yield f"kvtierd, pid {progress.pid}, is drained: nothing is under way, and nothing new is taken"
            yield f"  holds  {kept}, in {progress.pool_path or 'anonymous memory, which ends with it'}"
            yield "  next   `kvtierctl resume`, or stop it: kill -TERM, systemctl stop"
        case "late":
            active = progress.transfers_active
            what = count(active, "transfer") if active else "reading from a disk"
            yield f"{what} still active when the time was up"
            yield f"  kvtierd, pid {progress.pid}, goes on draining: wait again with the same command, or"
            yield "  take it back with `kvtierctl resume`; SIGTERM stops it and fails what is under way"
        case _:
            yield "somebody has resumed it meanwhile: it takes stores and loads again"


def reloaded(response: admin_pb2.ReloadResponse) -> Iterator[str]:
    """What a reload came to, for people."""
    for change in response.applied:
        yield f"{change.key}: {change.before} -> {change.after}"
    for change in response.needs_restart:
        yield f"{change.key}: stays {change.before}; {change.after} takes a restart (drain --for-restart)"
    if not response.applied and not response.needs_restart:
        yield "nothing has changed"


def count(number: int, what: str) -> str:
    """1 block, 2,000 blocks."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
