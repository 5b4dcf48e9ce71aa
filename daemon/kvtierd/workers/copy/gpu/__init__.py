"""A GPU as a copy worker's device: engines' memory is imported from their processes, and the GPU's copy
engines copy between it and the registered pool, without kernels and staging buffers.

Only a worker that is started for a GPU imports this package.
"""
