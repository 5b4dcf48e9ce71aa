"""The structures are those of cuda.h, whose sizes and offsets stand here (12.8 and 13.0, 64 bit)."""

import ctypes

import pytest
from kvtier_kernels.cuda import abi

SIZES = {
    abi.CUuuid: 16,
    abi.CUipcMemHandle: 64,
    abi.CUmemLocation: 8,
    abi.CUmemAllocationProp: 32,
    abi.CUmemAllocationFlags: 8,
    abi.CUmemAccessDesc: 12,
    abi.CUmemcpyAttributes: 24,
}

OFFSETS = [
    (abi.CUmemLocation, "id", 4),
    (abi.CUmemAllocationProp, "requested_handle_types", 4),
    (abi.CUmemAllocationProp, "location", 8),
    (abi.CUmemAllocationProp, "win32_handle_meta_data", 16),
    (abi.CUmemAllocationProp, "alloc_flags", 24),
    (abi.CUmemAllocationFlags, "gpu_direct_rdma_capable", 1),
    (abi.CUmemAllocationFlags, "usage", 2),
    (abi.CUmemAllocationFlags, "reserved", 4),
    (abi.CUmemAccessDesc, "flags", 8),
    (abi.CUmemcpyAttributes, "src_access_order", 0),
    (abi.CUmemcpyAttributes, "src_location_hint", 4),
    (abi.CUmemcpyAttributes, "dst_location_hint", 12),
    (abi.CUmemcpyAttributes, "flags", 20),
]


@pytest.mark.parametrize(
    ("structure", "size"), SIZES.items(), ids=lambda value: getattr(value, "__name__", value)
)
def test_structures_have_the_sizes_of_cuda_h(structure, size):
    assert ctypes.sizeof(structure) == size


@pytest.mark.parametrize(("structure", "field", "offset"), OFFSETS)
def test_fields_lie_where_cuda_h_has_them(structure, field, offset):
    assert getattr(structure, field).offset == offset


def test_only_the_older_batch_form_has_a_fail_index():
    assert len(abi.BATCH_PROTOTYPE) == 9
    assert len(abi.BATCH_V2_PROTOTYPE) == 8
    without_fail_index = (*abi.BATCH_PROTOTYPE[:7], abi.BATCH_PROTOTYPE[8])
    assert without_fail_index == abi.BATCH_V2_PROTOTYPE
