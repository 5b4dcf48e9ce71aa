"""GPUs, named by UUID."""

import uuid as uuids
from ctypes import byref, c_int, c_size_t, create_string_buffer
from dataclasses import dataclass

from kvtier_kernels.cuda.abi import UUID_BYTES, CUuuid
from kvtier_kernels.cuda.library import Library

_TEXT_BYTES = 256


@dataclass(frozen=True)
class DeviceInfo:
    """A GPU that this process sees."""

    ordinal: int
    """Its number in this process only: CUDA_VISIBLE_DEVICES changes it."""
    uuid: bytes
    """16 bytes; a MIG instance has its own."""
    name: str
    """device_name(uuid), as nvidia-smi -L prints it."""
    product: str
    pci_bus_id: str
    """As /sys/bus/pci/devices has it, for example "0000:3b:00.0"."""
    total_bytes: int
    is_mig: bool
    """Whether it is a slice of a GPU, whose memory the driver does not share between processes."""


def device_name(uuid: bytes) -> str:
    """The name of a GPU: "GPU-" and the UUID in lower case, 8-4-4-4-12. Raises ValueError unless `uuid` has
    16 bytes."""
    if len(uuid) != UUID_BYTES:
        raise ValueError(f"uuid has {len(uuid)} bytes, must have {UUID_BYTES}")
    return f"GPU-{uuids.UUID(bytes=uuid)}"


def visible_devices(library: Library) -> list[DeviceInfo]:
    """All visible GPUs, by ordinal. Needs no context and makes none. Raises CudaError."""
    count = c_int()
    library.call("cuDeviceGetCount", byref(count))
    return [_read(library, ordinal) for ordinal in range(count.value)]


def find_device(devices: list[DeviceInfo], text: str) -> DeviceInfo:
    """The GPU with this name, with or without "GPU-" and in any case. Raises LookupError, which names the
    visible ones."""
    wanted = text.strip().lower().removeprefix("gpu-")
    for device in devices:
        if device.name.removeprefix("GPU-") == wanted:
            return device
    visible = ", ".join(f"{device.name} ({device.product})" for device in devices) or "none"
    raise LookupError(f"no GPU {text!r} is visible to this process; visible: {visible}")


def _read(library: Library, ordinal: int) -> DeviceInfo:
    device = c_int()
    library.call("cuDeviceGet", byref(device), ordinal)
    product = create_string_buffer(_TEXT_BYTES)
    library.call("cuDeviceGetName", product, _TEXT_BYTES, device)
    pci_bus_id = create_string_buffer(_TEXT_BYTES)
    library.call("cuDeviceGetPCIBusId", pci_bus_id, _TEXT_BYTES, device)
    total = c_size_t()
    library.call("cuDeviceTotalMem_v2", byref(total), device)
    uuid = _uuid(library, "cuDeviceGetUuid_v2", device)
    # The first version returns the UUID of the whole GPU, and the second that of the MIG instance.
    whole = _uuid(library, "cuDeviceGetUuid", device) if library.has("cuDeviceGetUuid") else uuid
    return DeviceInfo(
        ordinal=ordinal,
        uuid=uuid,
        name=device_name(uuid),
        product=product.value.decode("utf-8", "replace"),
        pci_bus_id=pci_bus_id.value.decode("ascii", "replace").lower(),
        total_bytes=total.value,
        is_mig=uuid != whole,
    )


def _uuid(library: Library, call: str, device: c_int) -> bytes:
    uuid = CUuuid()
    library.call(call, byref(uuid), device)
    return bytes(uuid)
