"""A router that follows the KV events of several hosts, and chooses the one with most of a prompt.

    python events_router.py --model MODEL EVENTS,REPLAYS EVENTS,REPLAYS < prompts

EVENTS and REPLAYS are a daemon's `events.endpoint` and `events.replay_endpoint`, with `events.topic` as it is
by default. Each line on standard input is one prompt: its block hashes in hexadecimal, as
`python -m kvtier_vllm.hashes` prints them, with spaces between them. For each, the program prints what the
hosts have, and which of them to choose. It asks nobody: it knows. Of models with several groups of layers it
looks at the first one only.
"""

import argparse
import sys

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)
REPLAY_MS = 10_000
MEMORY = "CPU"


class Host:
    """What one host has, by topic: for each medium the hashes of its blocks."""

    def __init__(self, context, events, replays):
        self.name = events
        self.replays = replays
        self.context = context
        self.socket = context.socket(zmq.SUB)
        self.socket.subscribe(b"")
        self.socket.connect(events)
        self.numbers = {}  # the latest of each topic
        self.blocks = {}
        self.catch_up(b"", 0)

    def take(self):
        """Applies what has come since the last time."""
        while self.socket.poll(0):
            topic, number, payload = self.socket.recv_multipart()
            number = int.from_bytes(number, "big")
            known = self.numbers.get(topic, -1)
            if number == known + 1:
                self.apply(topic, number, payload)
            elif number > known:  # something is missing; what is there already comes with a lower number
                self.catch_up(topic, known + 1)

    def catch_up(self, topics, number):
        """Asks for everything from a number on. Where the daemon has no longer all of that, it begins with
        AllBlocksCleared, and tells what there is."""
        with self.context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.connect(self.replays)
            asking.send_multipart([b"", number.to_bytes(8, "big"), topics])
            while asking.poll(REPLAY_MS):
                _, topic, number, payload = asking.recv_multipart()
                if number == END:
                    return
                self.apply(topic, int.from_bytes(number, "big"), payload)
        print(f"{self.name}: no replay, so it may have more than is known here", file=sys.stderr)

    def apply(self, topic, number, payload):
        self.numbers[topic] = number
        media = self.blocks.setdefault(topic, {})
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "AllBlocksCleared":
                media.clear()
            elif event["group_idx"] == 0:
                hashes = media.setdefault(event["medium"], set())
                change = hashes.update if event["type"] == "BlockStored" else hashes.difference_update
                change(event["block_hashes"])

    def leading(self, model, prompt):
        """How many of a prompt's first blocks it has, and how many of these in memory."""
        best = 0, 0
        for topic, media in self.blocks.items():
            if topic.decode().split("@")[2] != model:
                continue
            run = 0
            while run < len(prompt) and any(prompt[run] in hashes for hashes in media.values()):
                run += 1
            best = max(best, (run, len(media.get(MEMORY, set()).intersection(prompt[:run]))))
        return best


def main():
    options = argparse.ArgumentParser()
    options.add_argument("hosts", nargs="+", metavar="EVENTS,REPLAYS")
    options.add_argument("--model", required=True)
    given = options.parse_args()
    context = zmq.Context()
    hosts = [Host(context, *endpoints.split(",")) for endpoints in given.hosts]
    for line in sys.stdin:
        # Events have the last 64 bits of a hash, as a number.
        prompt = [int(each[-16:], 16) for each in line.split()]
        found = {}
        for host in hosts:
            host.take()
            found[host.name] = host.leading(given.model, prompt)
            print("{} has {} blocks, {} of them in memory".format(host.name, *found[host.name]))
        print(f"send the request to {max(found, key=found.get)}", flush=True)
    context.destroy(linger=0)


if __name__ == "__main__":
    main()
