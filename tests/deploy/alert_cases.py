"""For every alert: series on which it fires, what it says then, and series on which it keeps quiet."""

from __future__ import annotations

from dataclasses import dataclass, field

HOST = 'job="kvtier", instance="host-1"'
LABELS = {"job": "kvtier", "instance": "host-1"}


@dataclass(frozen=True)
class Case:
    alert: str
    severity: str
    fires: dict[str, str]
    """Values by series, one a minute, as promtool writes them; HOST is put into the braces."""
    quiet: dict[str, str]
    at: str
    says: str
    labels: dict[str, str] = field(default_factory=dict)


CASES = [
    Case(
        "KvtierDown",
        "warning",
        {"up": "1 1 0 0 0 0 0"},
        {"up": "1 1 0 1 1 1 1"},
        "6m",
        "kvtierd on host-1 cannot be scraped: its engines compute every prefix themselves",
    ),
    Case(
        "KvtierHangs",
        "warning",
        {"kvtier_snapshot_fresh": "1 0 0 0 0"},
        {"kvtier_snapshot_fresh": "1 0 1 1 0"},
        "4m",
        "kvtierd on host-1 answers scrapes, but its event loop does not",
    ),
    Case(
        "KvtierRestarts",
        "warning",
        {"kvtier_uptime_seconds": "60 1 2 1 2 1 2 1 2 60"},
        {"kvtier_uptime_seconds": "60 120 1 60 120 1 60 120"},
        "9m",
        "kvtierd on host-1 has been started 4 times in 15 minutes",
    ),
    Case(
        "KvtierColdStart",
        "info",
        {"kvtier_start_warm": "0 0", "kvtier_uptime_seconds": "1 61"},
        {"kvtier_start_warm": "0 0", "kvtier_uptime_seconds": "86400 86460"},
        "1m",
        "kvtierd on host-1 has started with an empty pool; its log says why",
    ),
    Case(
        "KvtierCorruptBlocks",
        "critical",
        {'kvtier_integrity_failures_total{tier="host", found_by="sample"}': "0 0 0 1 1 1"},
        {'kvtier_integrity_failures_total{tier="host", found_by="sample"}': "1x6"},
        "5m",
        "Blocks on host-1 (host, found by sample) failed their check",
        {"tier": "host", "found_by": "sample"},
    ),
    Case(
        "KvtierAuditMismatch",
        "critical",
        {"kvtier_audit_mismatches_total": "0 0 0 1 1 1"},
        {"kvtier_audit_mismatches_total": "1x6"},
        "5m",
        "An engine of host-1 found stored blocks that it does not compute: outputs may be wrong",
    ),
    Case(
        "KvtierWorkerDown",
        "warning",
        {'kvtier_worker_live{device="cpu"}': "1 0 0 0"},
        {'kvtier_worker_live{device="cpu"}': "1 0 1 0"},
        "3m",
        "cpu on host-1 has had no worker for a minute",
        {"device": "cpu"},
    ),
    Case(
        "KvtierWorkerRespawns",
        "warning",
        {'kvtier_worker_respawns_total{device="cpu"}': "0+1x10"},
        {'kvtier_worker_respawns_total{device="cpu"}': "0 1 1 1 1 1 1 1 1 1 1"},
        "10m",
        "The worker of cpu on host-1 is lost again and again",
        {"device": "cpu"},
    ),
    Case(
        "KvtierDiskNotUsed",
        "warning",
        {'kvtier_disk_state{disk="/mnt/a", state="failing"}': "0 1x8"},
        {'kvtier_disk_state{disk="/mnt/a", state="starting"}': "1x9"},
        "8m",
        "/mnt/a on host-1 is failing: what it holds are misses",
        {"disk": "/mnt/a", "state": "failing"},
    ),
    Case(
        "KvtierStoreRefuses",
        "warning",
        {'kvtier_disk_state{disk="s3://kv/a", state="refusing"}': "0 1x18"},
        {'kvtier_disk_state{disk="s3://kv/a", state="live"}': "1x19"},
        "18m",
        "s3://kv/a takes nothing of host-1: it is full, or forbids writing",
        {"disk": "s3://kv/a", "state": "refusing"},
    ),
    Case(
        "KvtierEventsStopped",
        "warning",
        {"kvtier_events_alive": "0x8"},
        {"kvtier_events_alive": "1x9"},
        "8m",
        "host-1 tells routers nothing any more: they go by what they knew",
    ),
    Case(
        "KvtierDiskTooSlow",
        "info",
        {
            "kvtier_evicted_unwritten_blocks_total": "0+50x60",
            'kvtier_evicted_blocks_total{tier="host"}': "0+100x60",
        },
        {
            "kvtier_evicted_unwritten_blocks_total": "0+10x60",
            'kvtier_evicted_blocks_total{tier="host"}': "0+100x60",
        },
        "60m",
        "50% of what leaves the pool of host-1 was never written",
    ),
    Case(
        "KvtierStoresRefused",
        "warning",
        {
            "kvtier_store_throttled_blocks_total": "0+25x30",
            'kvtier_store_blocks_total{tier="host"}': "0+75x30",
        },
        {
            "kvtier_store_throttled_blocks_total": "0+1x30",
            'kvtier_store_blocks_total{tier="host"}': "0+99x30",
        },
        "30m",
        "25% of the blocks for host-1 find no room",
    ),
    Case(
        "KvtierLeasesCut",
        "warning",
        {
            'kvtier_lookup_misses_total{reason="lease_limit"}': "0+25x30",
            'kvtier_lookup_hits_total{tier="host"}': "0+75x30",
        },
        {
            'kvtier_lookup_misses_total{reason="lease_limit"}': "0+1x30",
            'kvtier_lookup_hits_total{tier="host"}': "0+99x30",
        },
        "30m",
        "25% of what host-1 has for its engines cannot be leased at once",
    ),
    Case(
        "KvtierForgetsSoon",
        "info",
        {
            'kvtier_evicted_age_seconds_sum{tier="host"}': "0+3000x130",
            'kvtier_evicted_age_seconds_count{tier="host"}': "0+10x130",
        },
        {
            'kvtier_evicted_age_seconds_sum{tier="host"}': "0+9000x130",
            'kvtier_evicted_age_seconds_count{tier="host"}': "0+10x130",
        },
        "130m",
        "Blocks leave the pool of host-1 5m 0s after their last use",
        {"tier": "host"},
    ),
    Case(
        "KvtierTransfersFail",
        "warning",
        {
            'kvtier_transfers_total{state="failed"}': "0+10x30",
            'kvtier_transfers_total{state="done"}': "0+90x30",
        },
        {
            'kvtier_transfers_total{state="failed"}': "0+1x30",
            'kvtier_transfers_total{state="done"}': "0+99x30",
        },
        "30m",
        "10% of the stores and loads of host-1 fail",
    ),
    Case(
        "KvtierQuarantine",
        "info",
        {"kvtier_quarantined_slots": "7x15"},
        {"kvtier_quarantined_slots": "7 7 7 7 0x12"},
        "15m",
        "7 slots of host-1 wait for a process that cannot be proved gone",
    ),
    Case(
        "KvtierPoolShort",
        "warning",
        {"kvtier_pool_short_bytes": "1073741824x5"},
        {"kvtier_pool_short_bytes": "0x5"},
        "5m",
        "The pool of host-1 is 1GiB smaller than pool.size: there is no memory for the rest",
    ),
    Case(
        "KvtierDrainForgotten",
        "warning",
        {"kvtier_draining": "1x40"},
        {"kvtier_draining": "1x20 0x20"},
        "40m",
        "kvtierd on host-1 has been draining for half an hour: nothing is cached",
    ),
    Case(
        "KvtierLeasesExpire",
        "info",
        {"kvtier_leases_expired_total": "0+2x15"},
        {"kvtier_leases_expired_total": "0 1x14"},
        "15m",
        "30 leases of host-1 ran out in 15 minutes",
    ),
    Case(
        "KvtierSlowFront",
        "warning",
        {
            'kvtier_event_loop_lag_seconds_bucket{le="0.5"}': "0+0x30",
            'kvtier_event_loop_lag_seconds_bucket{le="1.0"}': "0+600x30",
            'kvtier_event_loop_lag_seconds_bucket{le="+Inf"}': "0+600x30",
        },
        {
            'kvtier_event_loop_lag_seconds_bucket{le="0.1"}': "0+600x30",
            'kvtier_event_loop_lag_seconds_bucket{le="+Inf"}': "0+600x30",
        },
        "30m",
        "The event loop of host-1 is 995ms late: schedulers wait",
    ),
    Case(
        "KvtierMemoryHeld",
        "warning",
        {
            "kvtier_client_mapped_bytes": "1073741824x10",
            'kvtier_instances{state="ready"}': "0x10",
            'kvtier_instances{state="ending"}': "0x10",
        },
        {
            "kvtier_client_mapped_bytes": "1073741824x10",
            'kvtier_instances{state="ready"}': "0x10",
            'kvtier_instances{state="ending"}': "1x10",
        },
        "10m",
        "host-1 holds 1GiB of engines that are gone",
    ),
    Case(
        "KvtierEngineIncomplete",
        "info",
        {'kvtier_instances{state="incomplete"}': "1x20"},
        {'kvtier_instances{state="incomplete"}': "1x10 0x10"},
        "20m",
        "Ranks of 1 engines on host-1 have not come up",
        {"state": "incomplete"},
    ),
]


def series(given: dict[str, str]) -> list[dict[str, str]]:
    """As promtool wants them."""
    named = {
        (name.replace("{", f"{{{HOST}, ", 1) if "{" in name else f"{name}{{{HOST}}}"): values
        for name, values in given.items()
    }
    return [{"series": name, "values": values} for name, values in named.items()]


def promtool_tests(rule_files: list[str]) -> dict[str, object]:
    """The file for `promtool test rules`."""
    tests: list[dict[str, object]] = []
    for case in CASES:
        alert = {
            "exp_labels": LABELS | {"severity": case.severity} | case.labels,
            "exp_annotations": {"summary": case.says},
        }
        for given, expected in ((case.fires, [alert]), (case.quiet, [])):
            rule_test = {"eval_time": case.at, "alertname": case.alert, "exp_alerts": expected}
            tests.append({"interval": "1m", "input_series": series(given), "alert_rule_test": [rule_test]})
    return {"rule_files": rule_files, "evaluation_interval": "1m", "tests": tests}
