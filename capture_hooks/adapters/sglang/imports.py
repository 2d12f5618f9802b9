"""Call a function once a module has been imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` when module ``name`` has been imported: at once if it is there already.

    The callback must not raise; it runs on the importing thread, inside the import.
    """
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
        return
    _finder().wanted.setdefault(name, []).append(callback)


class _Finder(MetaPathFinder):
    """Stands first among the finders and lets the others find what is asked for."""

    def __init__(self) -> None:
        self.wanted: dict[str, list[Callback]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.wanted:
            return None
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self.wanted.pop(name))
                return spec
        return None


class _Loader(Loader):
    """A module's own loader, and the callbacks behind it."""

    def __init__(self, loader: Loader, callbacks: list[Callback]) -> None:
        self._loader, self._callbacks = loader, callbacks

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module is to look as if its own loader had loaded it alone.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for callback in self._callbacks:
            callback(module)


def _finder() -> _Finder:
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            return finder
    found = _Finder()
    sys.meta_path.insert(0, found)
    return found
