"""The dependencies of code: the globals that a function loads, the modules it imports, where these come from.

hotset reads the globals from the instructions, not from ``co_names``, which also holds the names of
attributes: an attribute ``.count`` would make an unrelated global ``count`` part of the identity.

A fingerprint identifies code of an *installed* distribution by its version. All other code is the *user's*,
and the fingerprint describes it by its content.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import dis
import functools
import importlib.metadata
import importlib.util
import platform
import re
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = [
    "READS_ENVIRONMENT",
    "bound_by",
    "cells_of",
    "constants_of",
    "globals_of",
    "imported_by",
    "installed",
    "is_users",
    "loaded_globals",
    "names_in",
    "package_of",
    "replaced_by_users",
    "source_of",
    "with_imported",
]

READS_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "expandvars"})
"""Names by which code reads the variables of the environment."""

_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_BINDING = frozenset({"STORE_GLOBAL", "STORE_DEREF"})
_IMPORT = frozenset({"IMPORT_NAME"})
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_IMPORTS = re.compile(
    rb"^[ \t]*(?:from[ \t]*(\.*)[ \t]*([\w.]*)[ \t]+import\b[ \t]*(\([^)]*\)|(?:\\\r?\n|[^\n])*)"
    rb"|import[ \t]+((?:\\\r?\n|[^\n])+))",
    re.MULTILINE,
)
_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()


@lru_cache(maxsize=4096)
def loaded_globals(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the globals that ``code`` and the code nested in it read, with the attributes read from them.

    Each chain of names is there once, in order of first use.

    Example:
        >>> import math
        >>> loaded_globals((lambda x: math.floor(x) + len(str(x))).__code__)
        (('math', 'floor'), ('len',), ('str',))
    """
    return tuple(dict.fromkeys(chain for each in _nested(code) for chain in _chains(each)))


def globals_of(function: types.FunctionType) -> Iterator[tuple[dict[str, Any], str]]:
    """Each global that a function reads, and each attribute of a module: the namespace, and the name in it.

    A name that the function itself binds (``global count; count += 1``) is its own state, and left out.
    """
    for name, *attributes in loaded_globals(function.__code__):
        names = function.__globals__
        if name in bound_by(function.__code__):
            continue
        yield names, name
        for attribute in attributes:  # settings.SIZE
            value = names.get(name)
            if not issubclass(type(value), types.ModuleType):
                break
            names, name = vars(value), attribute
            yield names, name


def cells_of(function: types.FunctionType) -> dict[str, types.CellType]:
    """The variables of enclosing functions that a function reads, and does not bind itself."""
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell for name, cell in cells if name not in bound_by(code)}


@lru_cache(maxsize=1024)
def bound_by(code: types.CodeType) -> frozenset[str]:
    """The globals, and the variables that functions share, that code binds."""
    return frozenset(step.argval for step in _steps(code, _BINDING) if step.opname in _BINDING)


def imported_by(function: types.FunctionType) -> list[str]:
    """Return the modules that a function, and the code nested in it, import while they run.

    Of ``from package import part`` the part counts as well where it is a module of the user's.

    Example:
        >>> def f():
        ...     import math
        >>> imported_by(f)
        ['math']
    """
    return _modules(_imports_of(function.__code__), _package(function.__globals__))


def with_imported(modules: Iterable[str]) -> set[str]:
    """Return modules of the user's, with those of the user's that their sources import, at any depth.

    None of them need have been imported yet.
    """
    found, todo = set[str](), list(modules)
    while todo:
        name = todo.pop()
        if name not in found and installed(name) is None:
            found.add(name)
            file = _file_of(name)
            package = name if file is not None and file.stem == "__init__" else name.rpartition(".")[0]
            if name == "__main__":
                package = _package(vars(sys.modules[name]))
            todo += _modules(_imports_in(source_of(name)), package)
    return found


def _package(names: Mapping[str, Any]) -> str:
    """The package of a module, by its globals."""
    package = names.get("__package__")
    return package if isinstance(package, str) else str(names.get("__name__")).rpartition(".")[0]


_Import = tuple[int, str, tuple[str, ...]]  # how many dots, the name after them, and what is taken from it


def _modules(imports: Iterable[_Import], package: str) -> list[str]:
    """The names of the modules that are imported from a module of this package."""
    found: dict[str, None] = {}
    for level, name, parts in imports:
        whole = name
        if level:
            outer = package.split(".")
            whole = ".".join(filter(None, (*outer[: max(len(outer) + 1 - level, 0)], name)))
        if not whole:
            continue
        found[whole] = None
        if parts and installed(whole) is None:
            found.update(dict.fromkeys(each for part in parts if _file_of(each := f"{whole}.{part}")))
    return list(found)


@lru_cache(maxsize=4096)
def _imports_of(code: types.CodeType) -> tuple[_Import, ...]:
    found: dict[_Import, None] = {}
    for each in _nested(code):
        steps = list(_steps(each, _IMPORT))
        for number, step in enumerate(steps):
            if step.opname in _IMPORT:
                level, parts = (before.argval for before in steps[number - 2 : number])
                found[level, str(step.argval), tuple(parts or ())] = None
    return tuple(found)


@lru_cache(maxsize=1024)
def _imports_in(source: bytes) -> tuple[_Import, ...]:
    """What a source imports, and more: each word after ``import``, as what is no module is left out."""
    found: dict[_Import, None] = {}
    for dots, name, parts, names in _IMPORTS.findall(source):
        words = re.findall(r"[\w.]+", (parts or names).decode(errors="replace"))
        if names:
            found.update(dict.fromkeys((0, word, ()) for word in words))
        else:
            found[len(dots), name.decode(errors="replace"), tuple(words)] = None
    return tuple(found)


@lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the globals and attributes that ``code`` and the code nested in it name.

    Example:
        >>> import math
        >>> sorted(names_in((lambda x: math.floor(x.real)).__code__))
        ['floor', 'math', 'real']
    """
    return frozenset(name for each in _nested(code) for name in each.co_names)


def is_users(value: Any) -> bool:
    """Whether a function, a class, or the class of an object is defined in a module of the user's.

    A partial counts as the function that it calls, a method as its function. A function that ``exec`` made is
    in no module.
    """
    value = _called(value)
    kind = type(value)
    if issubclass(kind, types.FunctionType):
        names = value.__globals__
        name = names.get("__name__")
    else:
        name = getattr(value if issubclass(kind, type) else kind, "__module__", None)
        names = getattr(sys.modules.get(str(name)), "__dict__", None)
    module = sys.modules.get(name) if isinstance(name, str) else None
    return module is not None and vars(module) is names and installed(str(name)) is None


def package_of(origin: Any) -> str:
    """The top-level package in which a class or function is defined; empty if it does not say.

    Example:
        >>> package_of(importlib.metadata.Distribution)
        'importlib'
    """
    module = getattr(origin, "__module__", None)
    return module.partition(".")[0] if isinstance(module, str) else ""


def _called(value: Any) -> Any:
    """What a partial calls, and the function of a method; any other value as it is."""
    while issubclass(type(value), (functools.partial, types.MethodType, staticmethod, classmethod)):
        value = value.func if issubclass(type(value), functools.partial) else value.__func__
    return value


def replaced_by_users(names: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the functions that users have put into a library's module or class, with their names there."""
    kinds = (types.FunctionType, staticmethod, classmethod, functools.partial)
    functions = [(name, value) for name, value in list(names.items()) if type(value) in kinds]
    own = names.get("__name__", names.get("__module__"))
    root = str(own).partition(".")[0]
    return [(name, value) for name, value in functions if _root_of(value) != root and is_users(value)]


def _root_of(value: Any) -> str:
    called = _called(value)
    if not issubclass(type(called), types.FunctionType):
        return ""
    return str(called.__globals__.get("__name__")).partition(".")[0]


def constants_of(module: str, names: Iterable[str]) -> list[tuple[str, Any]]:
    """Return the numbers, texts and containers of a user's module that differ from what its source says.

    The source counts by itself. This finds values that were set later (``settings.SCALE = 2``) or computed.
    A module that was not imported yet has none.

    Args:
        module: its name.
        names: the globals to compare.
    """
    found = getattr(sys.modules.get(module), "__dict__", {})
    wanted = [(name, found[name]) for name in sorted(set(names) & found.keys()) if _is_plain(found[name])]
    said = _literals(source_of(module)) if wanted else {}
    return [(name, value) for name, value in wanted if name not in said or repr(said[name]) != repr(value)]


def _is_plain(value: object) -> bool:
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    if type(value) is dict:
        return all(map(_is_plain, (*value.keys(), *value.values())))
    return type(value) in _PLAIN


@lru_cache(maxsize=64)
def _literals(source: bytes) -> dict[str, Any]:
    """The values of a module's globals that its source sets to literals."""
    found: dict[str, Any] = {}
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):
        return found
    for statement in statements:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            with contextlib.suppress(ValueError):
                value = ast.literal_eval(statement.value)
                found.update({target.id: value for target in targets if isinstance(target, ast.Name)})
    return found


@lru_cache(maxsize=4096)
def installed(module: str) -> str | None:
    """Return the distribution and version that a module belongs to, or None if it is the user's own.

    This does not import the module.

    Example:
        >>> installed("json").startswith("python 3."), installed("__main__") is None
        (True, True)
    """
    root = module.partition(".")[0]
    if root in ("__main__", "__mp_main__"):
        return None
    if root == "hotset":  # wherever it lies: what it puts in place of a library's function changes no sample
        return f"hotset {vars(sys.modules[root])['__version__']}"
    origin = _origin(module)
    if origin is None:
        return f"python {platform.python_version()}" if root in sys.stdlib_module_names else None
    if {"site-packages", "dist-packages"} & set(origin.parts) or _is_recorded(origin):
        return f"{root} {_version(root)}"
    return f"python {platform.python_version()}" if _LIBRARY in origin.parents else None


def _is_recorded(file: Path) -> bool:
    """Whether a file was installed into another folder of ``sys.path``, as ``pip install --target`` does."""
    folders = _folders(tuple(sys.path)).intersection(file.parents)
    return any(file.relative_to(folder).as_posix() in _recorded(str(folder)) for folder in folders)


@lru_cache(maxsize=8)
def _folders(path: tuple[str, ...]) -> frozenset[Path]:
    found: set[Path] = set()
    for folder in path:
        with contextlib.suppress(OSError):  # "" is the working folder, which may be gone
            found.add(Path(folder).resolve())
    return frozenset(found)


@lru_cache(maxsize=64)
def _recorded(folder: str) -> frozenset[str]:
    """The files that distributions have installed into a folder, relative to it."""
    found: set[str] = set()
    for distribution in importlib.metadata.distributions(path=[folder]):
        with contextlib.suppress(OSError, UnicodeError, csv.Error):  # a damaged one: its files are the user's
            rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
            found.update([row[0] for row in rows if row])
    return frozenset(found)


def source_of(module: str) -> bytes:
    """Return the bytes of a module's source file; empty if it cannot be read."""
    origin = _origin(module)
    try:
        return origin.read_bytes() if origin is not None else b""
    except OSError:
        return b""


def _origin(module: str) -> Path | None:
    """The file of a module, imported or not; that of its root package if it has none."""
    return _file_of(module) or _file_of(module.partition(".")[0])


def _file_of(module: str) -> Path | None:
    """The file of a module, found without importing it; None if it has none, or there is no such module."""
    # Not through __getattr__, which a lazy module may have; and sys.modules may hold other objects.
    file = getattr(sys.modules.get(module), "__dict__", {}).get("__file__")
    if isinstance(file, str):
        return Path(file).resolve()
    root, *names = module.split(".")
    for folder in _folders_of_package(root) if names else ():
        for path in (folder.joinpath(*names, "__init__.py"), folder.joinpath(*names[:-1], f"{names[-1]}.py")):
            with contextlib.suppress(OSError, ValueError):
                if path.is_file():
                    return path.resolve()
    return None if names else _found(root)[0]


def _folders_of_package(root: str) -> list[Path]:
    """Where the modules of a package lie; nowhere, if it is a module alone."""
    path = getattr(sys.modules.get(root), "__dict__", {}).get("__path__")
    if path is None:
        return _found(root)[1]
    try:
        return [Path(folder) for folder in path]
    except Exception:  # of an object that a program has put in its place
        return []


def _found(root: str) -> tuple[Path | None, list[Path]]:
    """The file of a module that is in no package, and where its parts lie if it is one itself."""
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return None, []
    if spec is None:
        return None, []
    is_file = spec.has_location and spec.origin
    return (
        Path(spec.origin).resolve() if is_file and spec.origin else None,
        [Path(folder) for folder in spec.submodule_search_locations or ()],
    )


@lru_cache(maxsize=1024)
def _version(root: str) -> str:
    """The version of the distribution that has this package; its name may differ (pillow has PIL)."""
    try:
        return importlib.metadata.version(root)
    except importlib.metadata.PackageNotFoundError:
        found = (each for each in importlib.metadata.distributions() if _has(each, root))
        names = {str(each.metadata["Name"]) for each in found}
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(names))


def _has(distribution: importlib.metadata.Distribution, root: str) -> bool:
    """Whether a distribution has this package.

    ``importlib.metadata.packages_distributions`` makes an object of each file of all distributions: that
    takes half a second, in each worker.
    """
    declared = distribution.read_text("top_level.txt")
    if declared:
        return root in declared.split()
    files = distribution.read_text("RECORD") or "\n".join(map(str, distribution.files or ()))
    return f"\n{root}/" in f"\n{files}" or f"\n{root}." in f"\n{files}"


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code, and that of the functions, classes and comprehensions in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const)


def _steps(code: types.CodeType, wanted: frozenset[str]) -> Iterable[dis.Instruction]:
    """The instructions of code that has one of those wanted, or none: to make each takes microseconds."""
    numbers = {dis.opmap[name] for name in wanted & dis.opmap.keys()}
    if numbers.isdisjoint(code.co_code[::2]):
        return ()
    # Before an instruction with a large number, as of the 128th name, others hold its upper part.
    return (step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG")


def _chains(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Each global that the code reads, with the attributes that it reads from it in turn."""
    chain: tuple[str, ...] = ()
    for step in _steps(code, _GLOBAL):
        if chain and step.opname in _ATTRIBUTE:
            chain += (str(step.argval),)
            continue
        if chain:
            yield chain
        chain = (str(step.argval),) if step.opname in _GLOBAL else ()
    if chain:
        yield chain
