"""The core: a pure state machine that makes every decision and performs none.

`Machine.handle(stimulus) -> (reply, actions)`. It has no I/O, no clock of its own, no randomness and no
threads. The front performs the actions in order before it hands in the next stimulus.
"""
