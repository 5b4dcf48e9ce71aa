"""What SGLang's and torch's modules read of Triton when they are imported. Nothing is compiled."""

import importlib
import sys


def _hide_from_torch():
    """Torch looks for Triton once, and would compile with it. So it looks here, while there is none."""
    this = sys.modules[__name__]
    sys.modules[__name__] = None  # type: ignore[assignment]
    try:
        import torch._inductor.runtime.triton_compat
        import torch.utils._triton

        torch.utils._triton.has_triton_package()
        torch.utils._triton.has_triton()
    finally:
        sys.modules[__name__] = this


_hide_from_torch()
__version__ = "3.9.0"


def _unchanged(*arguments, **named):
    """A decorator, with or without arguments."""
    if len(arguments) == 1 and callable(arguments[0]) and not named:
        return arguments[0]
    return lambda function: function


jit = autotune = heuristics = _unchanged


def cdiv(number, by):
    return -(-number // by)


def next_power_of_2(number):
    return 1 << max(0, number - 1).bit_length()


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    if name[0].islower():
        return importlib.import_module(f"{__name__}.{name}")
    return type(name, (), {"__init__": lambda self, *arguments, **named: None})
