"""A GPU as a copy worker's device: engines' memory imported from their processes, copied by the GPU's copy
engines between it and the registered pool. No kernels, no staging buffers.

Only a worker that is started for a GPU imports this package.
"""
