"""KV events of the host, for routers: `EventPublisher` tells them over ZeroMQ, in vLLM's format, which blocks
come and go. It is loaded only where `events.endpoint` is set, because it takes the extra `events`."""
