"""torch.nn: whether a module draws depends on its mode as much as on its class.

Dropout and similar classes draw in training mode, fractional pooling always, recurrent layers and attention
if they have a dropout. A batch normalisation in training mode returns the same output each time, but moves
its running statistics, and caching its output would stop that: its verdict is unknown. So is that of a module
with hooks in training mode: that of ``torch.nn.utils.spectral_norm`` moves its weight. A module that the user
wrote is unknown, or random if one of torch's modules inside it draws.
"""

from __future__ import annotations

from typing import Any

import torch

from hotset.determinism.verdict import (
    Kind,
    Verdict,
    ancestor,
    doubtful_function,
    name_of,
    replaced_method,
    verdict_of_children,
)

__all__ = ["WRAPS_CHILDREN", "children_in_order", "judge"]

WRAPS_CHILDREN = False


def children_in_order(container: Any) -> tuple[Any, ...] | None:
    """The modules of a Sequential that has no hooks and uses torch's own methods."""
    if ancestor(container, "torch") is not torch.nn.Sequential:
        return None
    if replaced_method(container, torch.nn.Sequential) or doubtful_function(container, "torch"):
        return None
    return tuple(container)


def judge(step: Any) -> Verdict | None:
    """Judge an instance of a class of ``torch.nn``, or of a class that the user derived from one."""
    base = ancestor(step, "torch")
    if base is None or not isinstance(step, torch.nn.Module):
        return None
    for module in step.modules():
        why = _draws(module)
        if why:
            inside = "" if module is step else f"{name_of(step)} holds a module that draws: "
            return _verdict(step, "random", f"{inside}{why}")
    if not base.__module__.startswith("torch.nn.modules.") or base is torch.nn.Module:
        return Verdict.of(step, "unknown", f"torch: hotset does not know the class {name_of(step)}")
    replaced = replaced_method(step, base)
    if replaced:
        return _verdict(step, "unknown", f"{name_of(step)} has its own {replaced}")
    adapting = next(filter(_adapts, step.modules()), None)
    if adapting is not None:
        return _verdict(step, "unknown", f"{name_of(adapting)} in training mode moves its running statistics")
    why = doubtful_function(step, "torch")
    if why:
        return _verdict(step, "unknown", why)
    if step.training and (step._forward_pre_hooks or step._forward_hooks):
        return _verdict(step, "unknown", f"{name_of(step)} in training mode has hooks, which may change it")
    children = list(step.children())
    if children:
        return verdict_of_children(step, children, f"torch.nn: only the modules in {base.__name__} may draw")
    if isinstance(step, torch.nn.RReLU) and step.training:
        return _verdict(step, "deterministic", "RReLU draws from a range of one slope", draws=True)
    return _verdict(step, "deterministic", f"{base.__name__} draws nothing in this mode")


def _verdict(step: Any, kind: Kind, what: str, draws: bool = False) -> Verdict:
    return Verdict.of(step, kind, f"torch.nn: {what}", draws)


def _draws(module: torch.nn.Module) -> str | None:
    """A sentence that says why this module itself draws, apart from its children; None if it does not."""
    name = name_of(module)
    if isinstance(module, (torch.nn.FractionalMaxPool2d, torch.nn.FractionalMaxPool3d)):
        return None if module._random_samples is not None else f"{name} draws its regions"
    if not module.training:
        return None
    if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:
        return f"{name} draws in training mode"
    if isinstance(module, torch.nn.RReLU) and module.lower != module.upper:
        return f"{name} draws its slopes in training mode"
    if isinstance(module, torch.nn.RNNBase) and module.dropout > 0 and module.num_layers > 1:
        return f"{name} has a dropout between its layers"
    if isinstance(module, torch.nn.MultiheadAttention) and module.dropout > 0:
        return f"{name} has a dropout on its weights"
    return None


def _adapts(module: torch.nn.Module) -> bool:
    """Whether this is a normalisation layer that moves its running statistics with each call."""
    if not isinstance(module, torch.nn.modules.batchnorm._NormBase):
        return False
    running = (module.running_mean, module.running_var)
    return module.training and module.track_running_stats and any(each is not None for each in running)
