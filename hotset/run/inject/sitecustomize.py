"""Imported by Python as it starts, because ``hotset run`` puts this folder first in PYTHONPATH.

It installs the import hook of hotset, takes its folder off ``sys.path`` and runs the ``sitecustomize`` that
Python would have found without it. What stays visible: ``PYTHONPATH`` and ``HOTSET_*`` in the environment,
which the processes that this one starts need, and a finder in ``sys.meta_path``.
"""

import gc
import os
import sys

__all__ = []  # an older Python may read this file


def _without_this_folder() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != here]


def _start() -> None:
    # Python's collector counts what is allocated, and looks at all objects now and then. If what is imported
    # here moved that moment behind the fork of each worker, each would take 0.1 s longer for its first batch.
    collects = gc.isenabled()
    gc.disable()
    try:
        from hotset.run.start import start
    except ImportError as error:
        _say_missing(error)
    else:
        start()
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def _say_missing(error: ImportError) -> None:
    """Tell `hotset run` that this interpreter has no hotset; the program runs as it is."""
    folder = os.environ.get("HOTSET_LEDGER")
    if folder and not (error.name or "").startswith("hotset."):
        try:
            with open(os.path.join(folder, "unreached"), "a") as file:
                file.write(sys.executable + "\n")
        except OSError:
            pass


if __name__ == "sitecustomize":  # not where a tool imports all of hotset's modules
    _without_this_folder()
    _start()
    # Python removes this module, and looks no further, if importing it fails with an ImportError of its name.
    # So where the user has no sitecustomize, the next line leaves all as if this one had not been there.
    del sys.modules["sitecustomize"]
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
