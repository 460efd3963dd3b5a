"""Decoder language models whose depth is a program."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxlayers.api import *  # noqa: F403


class _Package(ModuleType):
    """Imports the public names, and with them jax, at their first use: `jaxlayers --help` needs none."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") or name == "__all__":
            api = importlib.import_module("jaxlayers.api")
            vars(self).update({each: getattr(api, each) for each in api.__all__}, __all__=api.__all__)
        if name not in vars(self):
            raise AttributeError(f"module 'jaxlayers' has no attribute {name!r}")
        return vars(self)[name]

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system names a submodule here; two of them would hide the function of their name.
        if not (name in ("evaluate", "generate") and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})


sys.modules[__name__].__class__ = _Package
