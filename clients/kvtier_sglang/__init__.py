"""The linker for SGLang: its radix cache loads and stores pages by a kvtierd on the same host."""
