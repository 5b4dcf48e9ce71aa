"""The vLLM connector: a KVConnectorBase_V1 that stores and restores KV blocks through kvtierd."""
