"""Installs the hooks as a Python process below ``hotset run`` or ``hotset doctor`` starts.

It imports neither torch nor numpy: a process that decodes nothing must not pay for them.
"""

from __future__ import annotations

from collections.abc import Iterator

from hotset.run import decoders, loader_wait, pillow
from hotset.run.environment import options_here, watch_options_here
from hotset.run.import_hook import AfterImport, Hook
from hotset.run.ledger import REACHED, Ledger, ledger_here, left_alone

__all__ = ["start"]


def start() -> None:
    """Install the hooks, if this process runs below ``hotset run`` or ``hotset doctor``."""
    hooks: dict[str, list[Hook]] = {}
    for module, hook in _hooks():
        hooks.setdefault(module, []).append(hook)
    if not hooks:
        return
    watched = watch_options_here()
    for ledger in (ledger_here(), *([Ledger(watched.ledger)] if watched else [])):
        ledger.mark(REACHED)
    AfterImport({module: _each(found) for module, found in hooks.items()}).install()


def _hooks() -> Iterator[tuple[str, Hook]]:
    """The hooks for the command that runs this process; none if neither of the two does."""
    watched, options = watch_options_here(), options_here()
    observers: list[loader_wait.Observer] = []
    if options is not None:
        yield from decoders.hooks(options.functions)
        yield from pillow.hooks()
        observers.append(loader_wait.WaitSums())
    if watched is not None:
        # Imported here: a program below `hotset run` alone has no use for it.
        from hotset.run.doctor import watch

        watching = watch.install(watched)
        yield from watching.hooks()
        observers.append(watching)
    if observers:
        yield from loader_wait.hooks(observers)


def _each(hooks: list[Hook]) -> Hook:
    def hook(module: object) -> None:
        for one in hooks:
            try:
                one(module)  # type: ignore[arg-type]
            except Exception as error:
                # The module is of a version that the hook does not know: the program runs without it.
                name = getattr(module, "__name__", "?")
                left_alone(name, f"{type(error).__name__} as it was wrapped: {error}")

    return hook
