"""An engine's memory on an NVIDIA GPU, shared with the daemon. Needs the driver (libcuda.so.1); no torch.

    memory = DeviceMemory.of(kv_cache)  # a torch tensor, or anything with __cuda_array_interface__
    with Client(instance="demo", namespace=namespace, groups=[group], memory=memory) as client:
        stored = client.store(hashes, block_ids, doorbell=Doorbell(0, step))
        client.ring_on(torch.cuda.current_stream(), 0, step)  # after the kernels that were launched before

Offsets of planes count from the start of the memory (`memory.offset_of(tensor)`). Exporting is asked for anew
at every registration, so a daemon that was restarted, or memory that was given back and taken again
(`client.release_memory`, `client.register_memory`), needs nothing else.

Memory that the driver does not let other processes map is kept in a mirror in host memory:

    try:
        memory.check()
    except NotExportableError as error:
        mirror = MirrorMemory(memory, groups)  # say why: it is slower

The engine's contexts: the GPU's primary context is retained, and made current around each call of ours only.
Nothing here waits for work of the engine.
"""

from kvtier.cuda.memory import DeviceMemory
from kvtier.cuda.mirror import MirrorMemory
from kvtier.errors import NotExportableError

__all__ = ["DeviceMemory", "MirrorMemory", "NotExportableError"]
