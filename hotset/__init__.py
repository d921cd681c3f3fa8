"""hotset keeps accelerators fed: a shared-memory cache for PyTorch datasets, and a loader that uses it.

    import hotset

    train = hotset.cache(ImageFolder(root, transform=tf), memory="120GiB")
    loader = hotset.DataLoader(train, batch_size=256, shuffle=True, num_workers=8)

Names are loaded when they are first used (PEP 562), so that ``import hotset`` and the command line do not
wait for torch. Only ``multiprocessing``'s fork server loads at once what a loader's workers need: it forks
them, and each would load that anew.
"""

from __future__ import annotations

import contextlib
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotset import collate
    from hotset.dataset.build import cache
    from hotset.dataset.cached_dataset import CachedDataset
    from hotset.dataset.shared_cache import SharedCache, get_shm_size
    from hotset.dataset.streams.cached_stream import CachedStream
    from hotset.dataset.window import Window
    from hotset.determinism.batched import batched
    from hotset.determinism.declare import deterministic, nondeterministic
    from hotset.determinism.split import split
    from hotset.device.queue import DeviceQueue
    from hotset.device.sink import Sink, data_sink
    from hotset.errors import (
        ArgumentError,
        ClusterError,
        FolderError,
        HotsetError,
        HotsetWarning,
        LossNotFinite,
        NotCacheable,
        QuantityError,
        SegmentError,
        SessionError,
        StateError,
        UnsupportedPlatform,
    )
    from hotset.loader.loader import DataLoader
    from hotset.memoize.decorator import Memo, memo
    from hotset.store.leaves.codecs import register_codec
    from hotset.train.callbacks import Callback, EarlyStopping, LossMonitor, ModelCheckpoint, TimeMonitor
    from hotset.train.metrics import Accuracy, Loss
    from hotset.train.model import Model

__version__ = "0.1.0"

_MODULES = {
    "hotset.dataset.build": ["cache"],
    "hotset.dataset.cached_dataset": ["CachedDataset"],
    "hotset.dataset.streams.cached_stream": ["CachedStream"],
    "hotset.memoize.decorator": ["Memo", "memo"],
    "hotset.dataset.shared_cache": ["SharedCache", "get_shm_size"],
    "hotset.dataset.window": ["Window"],
    "hotset.determinism.batched": ["batched"],
    "hotset.determinism.declare": ["deterministic", "nondeterministic"],
    "hotset.determinism.split": ["split"],
    "hotset.device.queue": ["DeviceQueue"],
    "hotset.device.sink": ["Sink", "data_sink"],
    "hotset.errors": [
        "ArgumentError",
        "ClusterError",
        "FolderError",
        "HotsetError",
        "HotsetWarning",
        "LossNotFinite",
        "NotCacheable",
        "QuantityError",
        "SegmentError",
        "SessionError",
        "StateError",
        "UnsupportedPlatform",
    ],
    "hotset.loader.loader": ["DataLoader"],
    "hotset.store.leaves.codecs": ["register_codec"],
    "hotset.train.callbacks": ["Callback", "EarlyStopping", "LossMonitor", "ModelCheckpoint", "TimeMonitor"],
    "hotset.train.metrics": ["Accuracy", "Loss"],
    "hotset.train.model": ["Model"],
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Accuracy",
    "ArgumentError",
    "CachedDataset",
    "CachedStream",
    "Callback",
    "ClusterError",
    "DataLoader",
    "DeviceQueue",
    "EarlyStopping",
    "FolderError",
    "HotsetError",
    "HotsetWarning",
    "Loss",
    "LossMonitor",
    "LossNotFinite",
    "Memo",
    "Model",
    "ModelCheckpoint",
    "NotCacheable",
    "QuantityError",
    "SegmentError",
    "SessionError",
    "SharedCache",
    "Sink",
    "StateError",
    "TimeMonitor",
    "UnsupportedPlatform",
    "Window",
    "batched",
    "cache",
    "collate",
    "data_sink",
    "deterministic",
    "get_shm_size",
    "memo",
    "nondeterministic",
    "register_codec",
    "split",
]


def __getattr__(name: str) -> Any:
    if name in __all__ and sys.platform != "linux" and _HOMES.get(name) != "hotset.errors":
        from hotset.errors import UnsupportedPlatform

        raise UnsupportedPlatform(
            f"hotset runs on Linux only, and this is {sys.platform}: it needs memfd, /proc and Linux's file "
            "locks. Use torch.utils.data.DataLoader over the dataset itself here."
        )
    if name == "collate":
        found: Any = import_module("hotset.collate")
    elif name in _HOMES:
        found = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'hotset' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


# The fork server imports the main module for the workers that it forks.
if "multiprocessing.forkserver" in sys.modules and import_module("hotset._fork_server").is_fork_server():
    with contextlib.suppress(ImportError):  # as the server does; a worker that needs it raises
        import_module("hotset.dataset.build")
        import_module("hotset.loader.loader")
