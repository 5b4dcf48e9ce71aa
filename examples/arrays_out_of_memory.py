"""A program moves its own arrays out of its memory into the daemon, and brings each back when it needs it.

Who would use this: a program that works on more arrays than it has memory for, and that comes back to each of
them later. An inference engine that preempts requests is one such program (its arrays are KV blocks, on a
GPU); this one keeps particle simulations, and has memory for four of the sixteen.

Start a daemon with `kvtierd serve`, then run this program. Nothing here has a hash: `kvtier.swap` gives every
block a random key, so nobody else ever finds it, and holds a lease so that the daemon does not evict it.
"""

import sys
import time

import numpy as np
from kvtier import Client, Group, Namespace, Plane, SharedBuffer
from kvtier.swap import CanSwap, SwapSpace, SwapState

SIMULATIONS = 16
IN_MEMORY = 4
PARTICLES = 64 * 1024
ARRAY_BYTES = PARTICLES * 8
ROUNDS = 3


def settle(space, swapped, leaving):
    """Polls until a move has ended. A program with something else to do would poll now and then instead."""
    deadline_s = time.monotonic() + 30
    while space.poll(swapped) is leaving and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return swapped.state


class Arrays:
    """Sixteen arrays by number, of which four are in this process's memory at any time."""

    def __init__(self, memory, space):
        self._places = memory.array.view(np.float64).reshape(IN_MEMORY, PARTICLES)
        self._space = space
        self._inside = {}  # number of an array -> its place, the least recently used one first
        self._outside = {}  # number of an array -> what the swap space knows it by
        self._free = list(range(IN_MEMORY))
        self.moved_out = self.moved_in = 0

    def __getitem__(self, number):
        """The array with this number. It stays valid until the next call."""
        place = self._inside.pop(number, None)
        if place is None:
            place = self._free.pop() if self._free else self._make_room()
            if number in self._outside:
                self._bring_in(number, place)
            else:
                self._places[place] = number  # a new array begins with its own number everywhere
        self._inside[number] = place
        return self._places[place]

    def _make_room(self):
        """Moves the least recently used array out; returns its place."""
        number, place = next(iter(self._inside.items()))
        if self._space.can_swap_out([place]) is not CanSwap.OK:
            sys.exit("the daemon has no room: start it with a larger --pool-size")
        swapped = self._space.swap_out({str(number): [place]})
        if settle(self._space, swapped, SwapState.GOING_OUT) is not SwapState.OUT:
            sys.exit(f"array {number} could not be moved out: {swapped.error}")
        del self._inside[number]
        self._outside[number] = swapped
        self.moved_out += 1
        return place

    def _bring_in(self, number, place):
        """Fills the place with an array that is outside."""
        swapped = self._outside.pop(number)
        self._space.swap_in(swapped, [place])
        if settle(self._space, swapped, SwapState.COMING_IN) is not SwapState.IN:
            sys.exit(f"array {number} is lost and would have to be computed anew: {swapped.error}")
        self.moved_in += 1

    def close(self):
        """Lets go of the memory, and of everything that is outside."""
        for swapped in self._outside.values():
            self._space.discard(swapped)
        del self._places


def main():
    with SharedBuffer.create(IN_MEMORY * ARRAY_BYTES) as memory:
        plane = Plane(fragment_bytes=ARRAY_BYTES, base_offset=0, block_stride_bytes=ARRAY_BYTES)
        group = Group(block_tokens=1, num_blocks=IN_MEMORY, planes=(plane,))
        namespace = Namespace(model="examples/arrays", kv_dtype="float64", hash_scheme="none")
        with Client(instance="arrays", namespace=namespace, groups=[group], memory=memory) as client:
            if not client.wait_ready(timeout_s=30):
                sys.exit(f"no daemon: {client.status.why}")
            arrays = Arrays(memory, SwapSpace(client, blocks=SIMULATIONS))
            for _ in range(ROUNDS):
                for number in range(SIMULATIONS):
                    arrays[number][:] += 1  # one step of the simulation
            right = all((arrays[number] == number + ROUNDS).all() for number in range(SIMULATIONS))
            print(f"{SIMULATIONS} arrays of {ARRAY_BYTES >> 10} KiB, memory for {IN_MEMORY}")
            print(
                f"moved out {arrays.moved_out} times, in {arrays.moved_in} times, every number right: {right}"
            )
            arrays.close()


if __name__ == "__main__":
    main()
