"""How a client reaches its daemon: the address, the side socket, the steps of attaching, and the threads."""
