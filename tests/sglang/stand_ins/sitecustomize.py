"""Lets SGLang be imported where libraries are missing that it does not need to serve text: imports of these
succeed, and give modules with nothing in them, which spares a gigabyte. Submodules of `sgl_kernel` stay
missing, so that SGLang takes the kernels that it has for CPUs without it."""

import enum
import importlib.abc
import importlib.machinery
import sys
import types

PACKAGES = ("av", "decord", "pandas", "torchaudio", "torchvision")
TOP_ONLY = "sgl_kernel"
MODES = "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS"


class _Missing(types.ModuleType):
    """A module that has whatever it is asked for: classes where a name is written like one, and functions
    that do nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _made(name)
        setattr(self, name, made)
        return made


def _made(name):
    if name == "InterpolationMode":  # its members are read when SGLang is imported
        return enum.Enum("InterpolationMode", MODES)
    return type(name, (), {}) if name[0].isupper() else _nothing


def _nothing(*arguments, **named):
    return None


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        # Of Triton there is more in the folder beside this file.
        if name == TOP_ONLY or package in PACKAGES or name.startswith("triton."):
            return importlib.machinery.ModuleSpec(name, self, is_package=package != TOP_ONLY)
        return None

    def create_module(self, spec):
        return _Missing(spec.name)

    def exec_module(self, module):
        if "." not in module.__name__:
            module.__version__ = "0.28.0"


sys.meta_path.append(_Finder())
