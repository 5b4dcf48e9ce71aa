"""The copy worker: a process that copies between engines' memory and the pool, and that may be killed.

It is started by exec, with the pool's descriptor, one end of a packet channel and a status page; see
`__main__`.
"""
