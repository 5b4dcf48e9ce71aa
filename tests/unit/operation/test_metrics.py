"""What Prometheus is told."""

import asyncio
import dataclasses
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvtierd.cache import Snapshot
from kvtierd.config.settings import ConfigError
from kvtierd.core.ids import TenantTag
from kvtierd.metrics import DECLARED, Metrics, MetricsServer, families
from kvtierd.metrics.declared import as_markdown
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.operation.snapshots import BROKEN_GPU, GPU, IDLE_GPU, busy_snapshot

OBSERVED = {"kvtier_snapshot_fresh", "kvtier_event_loop_lag_seconds", "kvtier_rpc_seconds"}
"""Those that are not read from a snapshot."""


def samples(snapshot: Snapshot) -> dict[str, float]:
    """Every sample of a snapshot, by its name and labels."""
    found = {}
    for family in families(snapshot, "1.2", by_tenant=True):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


@pytest.mark.parametrize(
    ("sample", "value"),
    [
        ("kvtier_build_info{version=1.2}", 1),
        ("kvtier_uptime_seconds{}", 3725),
        ("kvtier_draining{}", 0),
        ("kvtier_pool_bytes{state=used}", 8 << 20),
        ("kvtier_pool_bytes{state=free}", 8 << 20),
        ("kvtier_pool_extents{state=assigned}", 7),
        ("kvtier_pool_extents{state=free}", 9),
        ("kvtier_blocks{state=ready}", 60),
        ("kvtier_blocks_max{}", 1000),
        ("kvtier_start_warm{}", 1),
        ("kvtier_recovered_blocks{}", 41),
        ("kvtier_quarantined_slots{}", 3),
        ("kvtier_discarded_slots{}", 44),
        ("kvtier_lookups_total{}", 21),
        ("kvtier_lookup_hits_total{tier=host}", 100),
        ("kvtier_shadow_hit_rate{pool=half}", 0.125),
        ("kvtier_shadow_hit_rate{pool=now}", 0.25),
        ("kvtier_shadow_hit_rate{pool=twice}", 0.375),
        ("kvtier_shadow_hit_rate{pool=actual}", 0.2625),
        ("kvtier_lookup_misses_total{reason=absent}", 110),
        ("kvtier_lookup_misses_total{reason=pending}", 60),
        ("kvtier_lookup_misses_total{reason=beyond}", 35),
        ("kvtier_lookup_misses_total{reason=lease_limit}", 15),
        ("kvtier_lookup_misses_total{reason=recompute}", 40),
        ("kvtier_lookup_misses_total{reason=draining}", 22),
        ("kvtier_lookup_misses_total{reason=not_ready}", 18),
        ("kvtier_slots{slot_bytes=4096,state=used}", 375),
        ("kvtier_slots{slot_bytes=4096,state=free}", 120),
        ("kvtier_slots{slot_bytes=4096,state=withheld}", 5),
        ("kvtier_slots{slot_bytes=65536,state=free}", 15),
        ("kvtier_pool_fragmented_bytes{}", 120 * 4096 + 15 * 65536),
        ("kvtier_evicted_age_seconds_sum{tier=host}", 290.5),
        ("kvtier_evicted_age_seconds_count{tier=host}", 29),
        ("kvtier_transfer_seconds_sum{direction=store}", 5.6),
        ("kvtier_transfer_seconds_count{direction=load}", 40),
        ("kvtier_lease_oldest_seconds{}", 12.5),
        ("kvtier_lease_held_seconds_sum{}", 72.5),
        ("kvtier_lease_held_seconds_count{}", 36),
        ("kvtier_instance_mapped_bytes{engine=1}", 3 << 20),
        (f"kvtier_pool_remote_bytes{{device={GPU}}}", 4 << 20),
        ("kvtier_store_blocks_total{tier=host}", 23),
        ("kvtier_store_bytes_total{tier=host}", 24 << 10),
        ("kvtier_load_bytes_total{tier=host}", 26 << 10),
        ("kvtier_store_deduplicated_blocks_total{}", 27),
        ("kvtier_store_throttled_blocks_total{}", 28),
        ("kvtier_store_unwanted_blocks_total{}", 52),
        ("kvtier_evicted_blocks_total{tier=host}", 29),
        ("kvtier_cleared_blocks_total{}", 45),
        ("kvtier_expired_blocks_total{}", 46),
        ("kvtier_unheld_blocks_total{}", 47),
        ("kvtier_held_blocks{}", 48),
        ("kvtier_held_bytes{}", 49 << 10),
        ("kvtier_transfers_total{state=cancelled}", 33),
        ("kvtier_transfers_active{}", 4),
        ("kvtier_integrity_failures_total{found_by=load,tier=host}", 11),
        ("kvtier_integrity_failures_total{found_by=restart,tier=host}", 12),
        ("kvtier_integrity_failures_total{found_by=sample,tier=host}", 13),
        ("kvtier_sampled_bytes_total{}", 71 << 20),
        ("kvtier_corrupt_slots{}", 2),
        ("kvtier_instances{state=ready}", 1),
        ("kvtier_instances{state=incomplete}", 0),
        ("kvtier_sessions{}", 1),
        ("kvtier_client_mapped_bytes{}", 3 << 20),
        ("kvtier_leases{}", 2),
        ("kvtier_leases_expired_total{}", 34),
        ("kvtier_worker_live{device=cpu}", 1),
        ("kvtier_worker_respawns_total{device=cpu}", 2),
        ("kvtier_device_mapped_bytes{device=cpu}", 3 << 20),
        (f"kvtier_worker_live{{device={GPU}}}", 1),
        (f"kvtier_imports_refused_total{{device={GPU},error=CUDA_ERROR_INVALID_CONTEXT}}", 8),
        (f"kvtier_worker_live{{device={BROKEN_GPU}}}", 0),
        (f"kvtier_worker_respawns_total{{device={IDLE_GPU}}}", 4),
        (f"kvtier_device_mapped_bytes{{device={GPU}}}", 5 << 20),
        (f"kvtier_device_mapped_bytes{{device={IDLE_GPU}}}", 0),
        (f"kvtier_pool_registered_bytes{{device={GPU}}}", 9 << 20),
        ("kvtier_parts_active{}", 13),
        ("kvtier_integrity_failures_total{found_by=read,tier=disk}", 15),
        ("kvtier_worker_live{device=disk-0}", 1),
        ("kvtier_worker_live{device=disk-1}", 0),
        ("kvtier_worker_respawns_total{device=disk-1}", 7),
        ("kvtier_disk_state{disk=/mnt/a,state=live}", 1),
        ("kvtier_disk_state{disk=/mnt/a,state=failing}", 0),
        ("kvtier_disk_state{disk=/mnt/b,state=failing}", 1),
        ("kvtier_disk_bytes{disk=/mnt/a,state=used}", 16 << 20),
        ("kvtier_disk_bytes{disk=/mnt/a,state=free}", 48 << 20),
        ("kvtier_disk_blocks{disk=/mnt/a}", 83),
        ("kvtier_disk_jobs{disk=/mnt/a}", 9),
        ("kvtier_disk_queued_bytes{direction=write,disk=/mnt/a}", 84 << 10),
        ("kvtier_disk_queued_bytes{direction=read,disk=/mnt/a}", 85 << 10),
        ("kvtier_disk_bytes_per_second{direction=read,disk=/mnt/a}", 2e9),
        ("kvtier_disk_bytes_per_second{direction=write,disk=/mnt/a}", 1e9),
        ("kvtier_disk_recovered_blocks{disk=/mnt/a}", 81),
        ("kvtier_disk_recovered_bytes{disk=/mnt/a}", 82 << 10),
        ("kvtier_disk_recovery_seconds{disk=/mnt/a}", 0.8),
        ("kvtier_disk_direct_io{disk=/mnt/a}", 1),
        ("kvtier_disk_corrupt_slots{disk=/mnt/b}", 2),
        ("kvtier_disk_scrub_blocks{disk=/mnt/a,state=all}", 88),
        ("kvtier_disk_scrub_blocks{disk=/mnt/a,state=done}", 22),
        ("kvtier_disk_written_blocks_total{disk=/mnt/a}", 90),
        ("kvtier_disk_written_bytes_total{disk=/mnt/a}", 91 << 10),
        ("kvtier_disk_read_blocks_total{disk=/mnt/a}", 92),
        ("kvtier_disk_read_bytes_total{disk=/mnt/a}", 93 << 10),
        ("kvtier_disk_reads_total{disk=/mnt/a}", 41),
        ("kvtier_disk_read_seconds_total{disk=/mnt/a}", 2.5),
        ("kvtier_store_transferred_bytes_total{direction=write,disk=s3://kv/blocks}", 65 << 10),
        ("kvtier_store_transferred_bytes_total{direction=read,disk=s3://kv/blocks}", 62 << 10),
        ("kvtier_disk_evicted_blocks_total{disk=/mnt/a}", 94),
        ("kvtier_disk_errors_total{disk=/mnt/a}", 96),
        ("kvtier_disk_corrupt_blocks_total{disk=/mnt/b}", 3),
        ("kvtier_promoted_blocks_total{}", 38),
        ("kvtier_promoted_bytes_total{}", 39 << 10),
        ("kvtier_recompute_blocks_total{}", 40),
        ("kvtier_evicted_unwritten_blocks_total{}", 14),
        ("kvtier_events_alive{}", 1),
        ("kvtier_event_topics{}", 2),
        ("kvtier_event_batches_total{}", 1_003),
        ("kvtier_event_blocks_total{kind=stored}", 4_005),
        ("kvtier_event_blocks_total{kind=removed}", 3_006),
        ("kvtier_event_resets_total{}", 7),
        ("kvtier_event_replays_total{outcome=answered}", 8),
        ("kvtier_event_replays_total{outcome=forgotten}", 3),
        ("kvtier_event_replays_total{outcome=refused}", 12),
        ("kvtier_event_topics_shown_total{}", 5),
        ("kvtier_event_kept_batches{}", 903),
        ("kvtier_event_kept_bytes{}", 91 << 10),
        ("kvtier_index_lookups_total{}", 15),
        ("kvtier_copy_bytes_total{direction=store}", 51),
        ("kvtier_copy_seconds_total{direction=load}", 0.62),
        ("kvtier_parts_total{direction=store,outcome=failed}", 1),
        ("kvtier_tenant_bytes{tenant=uid:1000,tier=host}", 6 << 20),
        ("kvtier_tenant_bytes{tenant=uid:1000,tier=disk}", 5 << 20),
        ("kvtier_tenant_blocks{tenant=uid:1000,tier=host}", 50),
        ("kvtier_tenant_blocks{tenant=uid:1000,tier=disk}", 51),
        ("kvtier_tenant_guaranteed_fraction{tenant=uid:1000}", 0.5),
        ("kvtier_tenant_leased_bytes{tenant=uid:1000}", 18 << 12),
        ("kvtier_tenant_sessions{tenant=uid:1000}", 1),
        ("kvtier_tenant_lookup_hashes_total{tenant=uid:1000}", 300),
        ("kvtier_tenant_lookup_hits_total{tenant=uid:1000}", 99),
        ("kvtier_tenant_store_bytes_total{tenant=uid:1000}", 21 << 10),
        ("kvtier_tenant_load_bytes_total{tenant=uid:1000}", 23 << 10),
        ("kvtier_tenant_evicted_blocks_total{tenant=uid:1000}", 24),
    ],
)
def test_every_figure_has_its_name(sample: str, value: float) -> None:
    assert samples(busy_snapshot())[sample] == value


def test_hits_and_misses_come_to_what_was_asked_for() -> None:
    found = samples(busy_snapshot())
    misses = sum(value for name, value in found.items() if name.startswith("kvtier_lookup_misses_total"))
    assert misses + found["kvtier_lookup_hits_total{tier=host}"] == found["kvtier_lookup_hashes_total{}"]


def test_every_metric_is_declared_and_every_declared_one_is_there() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, "1.2", by_tenant=True)
    loop = asyncio.new_event_loop()
    metrics.watch(busy_snapshot, loop)
    loop.close()
    shown = {family.name for family in registry.collect() if family.name.startswith("kvtier_")}
    assert shown == {declared.name for declared in DECLARED}


def test_the_documentation_has_the_list_as_it_is() -> None:
    page = Path(__file__).parents[3] / "docs" / "metrics.md"
    assert as_markdown() in page.read_text(), "python -m kvtierd.metrics prints the list"


def test_what_is_not_so_is_not_shown() -> None:
    found = samples(busy_snapshot())
    assert f"kvtier_worker_live{{device={IDLE_GPU}}}" not in found, "nobody needs one: no alarm"
    assert "kvtier_store_transferred_bytes_total{direction=read,disk=/mnt/a}" not in found, "it is no store"
    assert "kvtier_pool_registered_bytes{device=cpu}" not in found
    assert "kvtier_device_mapped_bytes{device=disk-0}" not in found, "it maps nothing of engines"


def test_without_a_disk_tier_nothing_is_said_of_one() -> None:
    found = samples(dataclasses.replace(busy_snapshot(), disks=()))
    assert not [name for name in found if "kvtier_disk" in name or "promoted" in name or "tier=disk" in name]


def test_without_events_nothing_is_said_of_them() -> None:
    found = samples(dataclasses.replace(busy_snapshot(), events=None))
    assert not [name for name in found if "kvtier_event" in name]


def test_engines_and_sizes_are_summed_where_they_are_too_many() -> None:
    snapshot = busy_snapshot()
    [instance] = snapshot.core.instances
    [size, _] = snapshot.core.sizes
    instances = tuple(
        dataclasses.replace(instance, name=f"engine {number}", number=number, mapped_bytes=1)
        for number in range(1, 201)
    )
    sizes = tuple(
        dataclasses.replace(size, slot_bytes=4096 * number, extents=number) for number in range(1, 101)
    )
    core = dataclasses.replace(snapshot.core, instances=instances, sizes=sizes)
    found = samples(dataclasses.replace(snapshot, core=core))
    mapped = {name: value for name, value in found.items() if "instance_mapped" in name}
    assert len(mapped) == 65
    assert mapped["kvtier_instance_mapped_bytes{engine=more}"] == 136
    assert sum(mapped.values()) == found["kvtier_client_mapped_bytes{}"] == 200
    slots = {name: value for name, value in found.items() if name.startswith("kvtier_slots")}
    assert len(slots) == 33 * 3
    assert slots["kvtier_slots{slot_bytes=409600,state=free}"] == size.free, "those with most extents"
    assert slots["kvtier_slots{slot_bytes=more,state=free}"] == 68 * size.free


def test_tenants_are_named_only_if_that_is_wanted() -> None:
    names = {family.name for family in families(busy_snapshot(), "1.2")}
    assert not [name for name in names if "tenant" in name]
    assert names == {declared.name for declared in DECLARED if "tenant" not in declared.name} - OBSERVED


def test_tenants_are_summed_where_they_are_too_many_and_no_counter_goes_back() -> None:
    snapshot = busy_snapshot()
    [tenant] = snapshot.core.tenants

    def of(count: int) -> dict[str, float]:
        tenants = tuple(
            dataclasses.replace(tenant, tag=TenantTag(number), name=f"uid:{number}" if number != 5 else "")
            for number in range(count)
        )
        core = dataclasses.replace(snapshot.core, tenants=tenants)
        found = samples(dataclasses.replace(snapshot, core=core))
        return {name: value for name, value in found.items() if "tenant" in name}

    few, many = of(70), of(200)
    assert set(few) == set(many)
    assert len(many) == 65 * 12
    assert many["kvtier_tenant_blocks{tenant=more,tier=host}"] == 136 * 50
    assert many["kvtier_tenant_blocks{tenant=tag:00000005,tier=host}"] == 50
    assert all(many[name] >= value for name, value in few.items())


def test_two_epochs_of_one_engine_are_one_series() -> None:
    snapshot = busy_snapshot()
    [instance] = snapshot.core.instances
    ending = dataclasses.replace(instance, fencing=True, mapped_bytes=5)
    core = dataclasses.replace(snapshot.core, instances=(ending, instance))
    found = samples(dataclasses.replace(snapshot, core=core))
    assert found["kvtier_instance_mapped_bytes{engine=1}"] == 5 + instance.mapped_bytes


def test_no_two_families_share_a_name_and_all_have_help() -> None:
    found = list(families(busy_snapshot(), "1"))
    assert len({family.name for family in found}) == len(found)
    assert all(family.documentation.endswith(".") and family.name.startswith("kvtier_") for family in found)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def server(registry: CollectorRegistry) -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1:0", registry)
    yield server
    server.close()


def scrape(server: MetricsServer) -> dict[str, float]:
    with urllib.request.urlopen(server.url, timeout=30) as answer:
        parsed = text_string_to_metric_families(answer.read().decode())
    return {sample.name: sample.value for family in parsed for sample in family.samples}


async def test_a_scrape_reads_a_snapshot_taken_on_the_loop(
    registry: CollectorRegistry, server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long this thread, which has the loop, waits for the processor.
    monkeypatch.setattr("kvtierd.metrics.registry.SNAPSHOT_DEADLINE_S", 25.0)
    metrics = Metrics(registry, "1")
    loop = asyncio.get_running_loop()
    taken_on = []

    def snapshot() -> Snapshot:
        taken_on.append(asyncio.get_running_loop())
        return busy_snapshot()

    metrics.watch(snapshot, loop)
    metrics.observe_rpc("lookup", 0.001)
    metrics.observe_rpc("a call that is not counted", 0.001)
    metrics.observe_lag(0.01)
    found = await asyncio.to_thread(scrape, server)
    assert found["kvtier_lookups_total"] == 21
    assert found["kvtier_snapshot_fresh"] == 1
    assert found["kvtier_event_loop_lag_seconds_count"] == 1
    assert found["process_resident_memory_bytes"] > 0
    assert set(taken_on) == {loop}


def test_a_stuck_loop_does_not_take_the_metrics_with_it(
    registry: CollectorRegistry, server: MetricsServer
) -> None:
    loop = asyncio.new_event_loop()
    Metrics(registry, "1").watch(busy_snapshot, loop)
    found = scrape(server)
    assert found["kvtier_snapshot_fresh"] == 0
    assert found["kvtier_lookups_total"] == 21, "the last that was known"
    loop.close()
    assert scrape(server)["kvtier_snapshot_fresh"] == 0


def test_a_taken_port_is_refused_by_field(server: MetricsServer) -> None:
    taken = server.url.removeprefix("http://").removesuffix("/metrics")
    with pytest.raises(ConfigError) as error:
        MetricsServer(taken, CollectorRegistry())
    assert error.value.field == "metrics.listen"
    assert taken in str(error.value)


def test_where_nobody_chose_the_port_a_taken_one_gives_way_to_a_free_one(server: MetricsServer) -> None:
    taken = server.url.removeprefix("http://").removesuffix("/metrics")
    other = MetricsServer(taken, CollectorRegistry(), may_move=True)
    try:
        assert other.url != server.url
        assert scrape(other) == {}
    finally:
        other.close()
