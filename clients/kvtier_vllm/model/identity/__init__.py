"""What identifies the blocks of an engine besides the content of its prompts, field by field.

`fields` and `variables` class everything that can be set in vLLM; `settings` takes out of an engine's
configuration what is in the identity; `positions` knows when the longest prompt matters to the values.
"""
