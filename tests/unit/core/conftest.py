"""Every test of the core runs on the native block table and on the plain-Python one."""

from collections.abc import Callable
from typing import Any

import pytest
from kvtier_kernels import BlockTable as NativeTable

from tests.oracles.block_table import BlockTable as OracleTable
from tests.unit.core.disk import DiskHost
from tests.unit.core.host import Host


@pytest.fixture(params=[NativeTable, OracleTable], ids=["native", "oracle"])
def table(request: pytest.FixtureRequest) -> Any:
    """The class of a block table."""
    return request.param


@pytest.fixture
def host(table: Any) -> Host:
    return Host(table)


@pytest.fixture
def make_host(table: Any) -> Callable[..., Host]:
    """`make_host(limits, geometry)`."""
    return lambda *arguments, **options: Host(table, *arguments, **options)


@pytest.fixture
def make_disk_host(table: Any) -> Callable[..., DiskHost]:
    """`make_disk_host(**options)`."""
    return lambda **options: DiskHost(table, **options)


@pytest.fixture
def disk_host(table: Any) -> DiskHost:
    """One live disk, to which blocks are written as soon as they are stored."""
    return DiskHost(table)
