"""What identifies an engine's blocks: the model's configuration, its weights and its LoRA adapters."""
