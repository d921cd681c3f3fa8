"""Graphs of PyTorch Geometric: the contents of their storages, and attributes.

A graph keeps its values in storages, each of which refers back to it weakly, and classes of its own that are
the same in all graphs. So it is no tree of values as it is, and becomes one without these.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from hotset.store.leaves.instances import is_plain
from hotset.store.leaves.leaf import SchemaMismatch

__all__ = ["graphs_of"]

_GRAPHS = {"Data": "data", "HeteroData": "hetero_data", "TemporalData": "temporal"}  # and the modules
# The class of the storage, or of the storages in a dict, in each of these attributes.
_STORAGES = {
    "_store": "GlobalStorage",
    "_global_store": "BaseStorage",
    "_node_store_dict": "NodeStorage",
    "_edge_store_dict": "EdgeStorage",
}


def graphs_of(cls: type[Any]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """How graphs of a class are flattened and built again; None if it is no class of such graphs."""
    base = _graph(cls)
    if base is None or not is_plain(cls):
        return None
    storages = sys.modules["torch_geometric.data.storage"]
    same = {name: part for name, part in vars(base()).items() if isinstance(part, type)}

    def content(graph: Any, storage: Any, name: str) -> Any:
        known = type(storage) is getattr(storages, _STORAGES[name])
        if not known or vars(storage).keys() - {"_key"} != {"_mapping", "_parent"}:
            raise SchemaMismatch(f"a {cls.__qualname__} with a storage that is more than its content")
        if storage._parent() is not graph:
            raise SchemaMismatch(f"a {cls.__qualname__} with a storage of another graph")
        return storage._mapping

    def flatten(graph: Any) -> Any:
        if type(graph) is not cls:
            raise SchemaMismatch(f"a graph of another class of the name {cls.__qualname__}")
        own, held = dict(vars(graph)), {}
        if any(own.pop(name, None) is not part for name, part in same.items()):
            raise SchemaMismatch(f"a {cls.__qualname__} with views of a class of its own")
        for name in own.keys() & _STORAGES.keys():
            part = own.pop(name)
            if type(part) is dict:
                held[name] = {key: content(graph, storage, name) for key, storage in part.items()}
            else:
                held[name] = content(graph, part, name)
        return dict(sorted(held.items())), own

    def storage(graph: Any, name: str, mapping: Any, **key: Any) -> Any:
        made: Any = object.__new__(getattr(storages, _STORAGES[name]))
        vars(made).update(_mapping=mapping, _parent=weakref.ref(graph), **key)
        return made

    def unflatten(tree: Any) -> Any:
        held, own = tree
        graph: Any = object.__new__(cls)
        vars(graph).update(same)
        for name, part in held.items():
            if name.endswith("_dict"):
                made: Any = {key: storage(graph, name, mapping, _key=key) for key, mapping in part.items()}
            else:
                made = storage(graph, name, part)
            vars(graph)[name] = made
        vars(graph).update(own)
        return graph

    return flatten, unflatten


def _graph(cls: type) -> Any:
    """The class of PyTorch Geometric's graphs from which a class is derived, or which it is."""
    for name, module in _GRAPHS.items():
        base = getattr(sys.modules.get(f"torch_geometric.data.{module}"), name, None)
        if base is not None and issubclass(cls, base):
            return base
    return None
