"""The core: a pure state machine that decides everything and does nothing.

`Machine.handle(stimulus) -> (reply, actions)`. No IO, no clock of its own, no randomness, no threads. The
front performs the actions in order before it hands in the next stimulus.
"""
