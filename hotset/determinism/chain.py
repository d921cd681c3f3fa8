"""A chain of transforms: its leaves, in the order in which they are applied, and its cut into two chains.

::

    [load, Compose([resize, Compose([crop, flip])]), norm]        leaves: load resize crop flip norm
                                         ^ cut here, n = 3
    prefix: load, resize, crop           suffix: flip, norm

hotset opens a container that does nothing but apply its children in order. A container that chooses among its
children, or converts boxes before and after them, is a leaf; so is one that the user has declared as a whole.

The cut takes apart only the containers that it runs through, and leaves all others as they are. Some
containers do work around each child: MONAI's Compose maps it over the items of a list. Of such a container
the cut makes two, of the same kind and settings. So applying the prefix and then the suffix equals applying
the chain.

Inside a container that does work around each child, hotset opens only containers of the same library: MONAI's
Compose would take a tuple from the middle of a torchvision Compose for a list of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hotset.determinism.libraries.albumentations import takes_keywords, without_draws
from hotset.determinism.verdict import library_of, stated
from hotset.errors import ArgumentError

__all__ = ["Values", "applied", "cut", "is_list", "leaves", "takes_keywords"]


class Values(tuple[Any, ...]):
    """Several values that a chain is applied to together, such as picture and boxes; each step takes all."""


def applied(step: Callable[..., Any], value: Any) -> Any:
    """Apply a step to a value, or to several. A transform of albumentations takes a dict's items as keywords.

    Example:
        >>> applied(lambda a, b: (b, a), Values((1, 2)))
        (2, 1)
    """
    kind: type = type(step)
    if isinstance(value, dict) and takes_keywords(kind):
        return step(**value)
    if not isinstance(value, Values):
        return step(value)
    made = step(*value)
    return Values(made) if isinstance(made, tuple) and len(made) == len(value) else made


def is_list(chain: Any) -> bool:
    """Whether this is a list or tuple of transforms, and not a transform whose class derives from one.

    Example:
        >>> class Sequential(list):
        ...     def __call__(self, value): ...
        >>> is_list([abs, len]), is_list(Sequential([abs, len]))
        (True, False)
    """
    return isinstance(chain, (list, tuple)) and not callable(chain)


def leaves(chain: Any) -> list[Any]:
    """The leaf transforms of a chain, in order.

    Args:
        chain: a transform, a container of a known library, or a list or tuple of these, to any depth.

    Returns:
        The leaves themselves, not copies. (MONAI transforms that are lazily resampled together are one leaf,
        a Compose of them.)

    Example:
        >>> import torch.nn as nn
        >>> [type(leaf).__name__ for leaf in leaves([nn.Sequential(nn.ReLU(), nn.Dropout()), nn.Tanh()])]
        ['ReLU', 'Dropout', 'Tanh']
    """
    return _leaves(chain, None)


def cut(chain: Any, n: int) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Cut a chain after its first ``n`` leaves.

    Args:
        chain: as for :func:`leaves`.
        n: how many leaves go to the prefix, 0 to all.

    Returns:
        (prefix, suffix), each a list of callables, empty for no leaves; a chain without leaves is a prefix,
        as nothing of it need run for each use. Applying the prefix and then the
        suffix equals applying the chain. They are called as the chain's containers are: albumentations' take
        keywords and return a dict. Their containers in the prefix draw nothing themselves.

    Raises:
        ArgumentError: there are fewer than ``n`` leaves, or ``n`` is negative.

    Example:
        >>> import torch.nn as nn
        >>> cut(nn.Sequential(nn.ReLU(), nn.Tanh()), 1)
        ([ReLU()], [Tanh()])
    """
    count = len(leaves(chain))
    if not 0 <= n <= count:
        raise ArgumentError(f"n must be from 0 to {count}, the number of transforms in the chain, got {n}.")
    if n in (0, count):
        whole = list(chain) if is_list(chain) else [chain]
        before, after = (whole, []) if n == count else ([], whole)
    else:
        before, after = _cut(chain, n, None)
    return [without_draws(step) for step in before], after


def _cut(node: Any, n: int, outer: Any) -> tuple[list[Any], list[Any]]:
    """Cut a container, which stands directly in ``outer``, within its leaves: after the first ``n``."""
    children = _children(node, outer)
    assert children is not None, "a leaf cannot be cut"
    before: list[Any] = []
    after: list[Any] = []
    for child in children:
        size = len(_leaves(child, node))
        if n >= size:
            before.append(child)
        elif n <= 0:
            after.append(child)
        else:
            left, right = _cut(child, n, node)
            before += left
            after += right
        n -= size
    return _part(node, before, True), _part(node, after, False)


def _leaves(node: Any, outer: Any) -> list[Any]:
    """The leaves of a node that stands directly in ``outer``; None: in nothing."""
    children = _children(node, outer)
    if children is None:
        return [node]
    return [leaf for child in children for leaf in _leaves(child, node)]


def _children(node: Any, outer: Any) -> Sequence[Any] | None:
    """The children of a container that may be opened where it stands, in ``outer``; None for a leaf."""
    if is_list(node):
        return node  # type: ignore[no-any-return]
    library = library_of(node)
    outer_library = None if is_list(outer) else library_of(outer)
    if library is None:
        return None
    if outer_library is not None and outer_library.WRAPS_CHILDREN and outer_library is not library:
        return None
    if stated(node) is not None:
        return None
    children: Sequence[Any] | None = library.children_in_order(node)
    return children


def _part(node: Any, children: list[Any], first: bool) -> list[Any]:
    """Callables that apply these children as the container applies them; ``first``: it begins with them."""
    library = library_of(node)
    if library is None or not library.WRAPS_CHILDREN or not children:
        return children
    part: list[Any] = library.part(node, children, first)
    return part
