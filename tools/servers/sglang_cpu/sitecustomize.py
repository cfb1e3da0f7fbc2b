"""Lets SGLang be imported on a host without a GPU: stands in for two packages whose wheels need CUDA.

Python runs a `sitecustomize.py` that lies on PYTHONPATH at its start, in every process of the server.

Only importing works. A stand-in that is CALLED raises: a kernel that quietly did nothing would serve wrong numbers.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

MISSING = ("torchvision", "sgl_kernel")


class _Absent(type):
    """A class whose attributes are absent things as well, so that `module.name.name` can be imported and subclassed."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{cls.__name__}.{name}")

    def __call__(cls, *args: object, **kwargs: object) -> object:
        raise RuntimeError(f"{cls.__name__} was called, but its package does not run on a host without a GPU")


def _absent(name: str) -> type:
    return _Absent(name, (), {})


class _AbsentModule(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] in MISSING:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
