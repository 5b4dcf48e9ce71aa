"""An engine's memory on an NVIDIA GPU, shared with the daemon. Needs the driver (libcuda.so.1), but no torch.

    from kvtier import Client, Doorbell, Group, Namespace, Plane
    from kvtier.cuda import DeviceMemory
    from kvtier_kernels.cuda import load

    driver = load()  # here the engine uses the driver's interface; torch does as well
    driver.retain_primary(0).make_current()
    block_bytes, num_blocks = 65_536, 64
    kv_cache = driver.alloc(num_blocks * block_bytes)
    stream = driver.stream_create()  # torch.cuda.current_stream()

    memory = DeviceMemory(kv_cache, num_blocks * block_bytes)  # DeviceMemory.of(tensor)
    plane = Plane(fragment_bytes=block_bytes, base_offset=0, block_stride_bytes=block_bytes)
    group = Group(block_tokens=16, num_blocks=num_blocks, planes=(plane,))
    namespace = Namespace(model="demo", kv_dtype="bfloat16", hash_scheme="none", hash_bytes=8)
    with Client(instance="gpu", namespace=namespace, groups=[group], memory=memory) as client:
        if not client.wait_ready(timeout_s=60):
            raise SystemExit(client.status.why)
        hashes = [bytes([number] * 8) for number in range(3)]
        # The engine launches the kernels of step 1 on its stream, and then:
        stored = client.store(hashes, [0, 1, 2], doorbell=Doorbell(0, 1))  # waits for doorbell 0 to say 1
        client.ring_on(stream, 0, 1)  # the stream says so, once the kernels launched before are done
        print(stored.wait(timeout_s=60).done)  # True
        with client.lookup(hashes, lease=True, timeout_s=60) as hit:
            if hit.lease:
                print(client.load(hit, [10, 11, 12][: hit.hits]).wait(timeout_s=60).done)  # True
    driver.stream_destroy(stream)
    driver.free(kv_cache)

Offsets of planes count from the start of the memory (`memory.offset_of(tensor)`). The memory is exported anew
at every registration, so nothing else is needed after the daemon was restarted, or after memory was given
back and taken again (`client.release_memory`, `client.register_memory`).

If the driver does not let other processes map the memory, `memory.check()` raises NotExportableError. Such
memory is mirrored in host memory, which is slower: see `MirrorMemory(memory, groups)`. Where only the daemon
is not let in, as between some containers, `client.memory_error` says so (Reason.IMPORT_REFUSED).

The GPU's primary context, which is the engine's, is retained, and made current only around each call of ours.
Nothing here waits for the engine's work.
"""

from kvtier.cuda.memory import DeviceMemory
from kvtier.cuda.mirror import MirrorMemory
from kvtier.errors import NotExportableError

__all__ = ["DeviceMemory", "MirrorMemory", "NotExportableError"]
