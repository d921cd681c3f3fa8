"""What happens as a Python process below ``hotset run`` starts: hooks are installed, and nothing imported.

Neither torch nor numpy is: a process that decodes nothing must not pay for them.
"""

from __future__ import annotations

from hotset.run import decoders, environment, loader_wait, pillow
from hotset.run.import_hook import AfterImport, Hook

__all__ = ["start"]


def start() -> None:
    """Install the hooks, if the process is below ``hotset run``."""
    options = environment.options_here()
    if options is None:
        return
    hooks: dict[str, list[Hook]] = {}
    for module, hook in (
        *decoders.hooks(options.functions),
        *pillow.hooks(),
        *loader_wait.hooks(),
    ):
        hooks.setdefault(module, []).append(hook)
    environment.reached()
    AfterImport({module: _each(found) for module, found in hooks.items()}).install()


def _each(hooks: list[Hook]) -> Hook:
    def hook(module: object) -> None:
        for one in hooks:
            try:
                one(module)  # type: ignore[arg-type]
            except Exception as error:
                # The module is of a version that the hook does not know: the program runs without it.
                name = getattr(module, "__name__", "?")
                environment.left_alone(name, f"{type(error).__name__} as it was wrapped: {error}")

    return hook
