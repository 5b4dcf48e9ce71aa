"""A small world around the core, driven by a seed: engines, copy workers and a pool that hold real
contents."""
