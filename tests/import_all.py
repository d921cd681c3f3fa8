"""Imports every module of hotset in an interpreter without its dependencies: test_oldest_python runs it.

    python -I -S import_all.py FOLDER

The standard library is the interpreter's own. In place of every other package there are stubs, whose
attributes are classes that can be subscripted, inherited from, called, used as decorators and reckoned with,
as modules do with them while they are imported.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import traceback
import types
from pathlib import Path
from typing import Any


class _Meta(type):
    """What a stub can do."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Meta(name, (Stub,), {})
        setattr(cls, name, made)
        return made

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        if cls.__module__ != __name__:  # a class of hotset's that inherits from a stub
            return super().__call__(*arguments, **named)
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else _Meta("made", (Stub,), {})

    def __iter__(cls) -> Any:
        return iter(())

    def __int__(cls) -> int:
        return 1

    __index__ = __int__

    def _reckon(cls, *other: Any) -> Any:
        return cls

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __lshift__ = __rlshift__ = _reckon
    __or__ = __ror__ = __and__ = __rand__ = __invert__ = __neg__ = __floordiv__ = _reckon


class Stub(metaclass=_Meta):
    """Anything of another package."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __init_subclass__(cls, **named: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


class _Stubs:
    """Finds packages that nobody else found, but none that the standard library might have."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        if top == "hotset" or top in sys.stdlib_module_names or top in NEWER:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        made: dict[str, Any] = {}  # not in the module: who looks through all that is in it finds nothing
        module.__dict__["__getattr__"] = lambda name: _attribute(made, name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = "1.0.0"


# Of the standard library of Pythons newer than the oldest.
NEWER = {"tomllib", "annotationlib", "compression", "string.templatelib", "concurrent.interpreters"}


def _attribute(made: dict[str, Any], name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return made.setdefault(name, Plain if name == "Dataset" else _Meta(name, (Stub,), {}))


class Plain:
    """torch's Dataset, which hotset derives from with a metaclass of its own."""

    __init__ = Stub.__init__
    __class_getitem__ = classmethod(lambda cls, item: cls)


def main(folder: Path) -> int:
    """Import everything below ``folder``/hotset, and compile what lies beside it; return the exit code."""
    sys.path.insert(0, str(folder))
    sys.meta_path.append(_Stubs())
    failed = imported = 0
    for path in sorted((folder / "hotset").rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        try:
            importlib.import_module(name)
            imported += 1
        except BaseException:
            failed += 1
            print(f"--- {name}")
            traceback.print_exc(limit=-3, file=sys.stdout)
    for beside in ("tests", "examples", "benchmarks"):
        for path in sorted((folder / beside).rglob("*.py")):
            try:
                compile(path.read_bytes(), str(path), "exec")
            except SyntaxError as error:
                failed += 1
                print(f"--- {error.filename}:{error.lineno}: {error.msg}")
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"Python {version}: {imported} modules imported, {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    sys.exit(main(Path(sys.argv[1])))
