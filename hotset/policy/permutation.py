"""Permutations without a table: a number's place is computed without those of the other numbers.

A shuffle takes memory and time for all n numbers, even if only a few are needed. Here arithmetic alone gives
each number's place, so any process computes only the places that it needs, and all processes agree.

Write the numbers below n into a rectangle of about sqrt(n) columns. A round rotates each row by an amount
drawn for that row, then each column by an amount drawn for that column. Each rotation can be undone, so
together they permute the rectangle. A number that lands on one of the few cells numbered n or more is
permuted again until it lands below n, which leaves a permutation of the numbers below n. This is an
alternating Feistel network with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
2002). The amounts are the output of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators", 2014) at a counter: 64-bit integer arithmetic, the same on every machine and in every version of
numpy.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["key", "permute"]

_Words: TypeAlias = npt.NDArray[np.uint64]

# The smallest rectangles draw fewest amounts and need most rounds: the frequencies of all permutations of 5
# or 6 samples are equal to within 30 % after 4 rounds, 8 % after 6, 3 % after 8 (root mean square, 4 million
# keys).
_ROUNDS = 8

_GOLDEN, _MIX1, _MIX2 = (
    np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_27, _30, _31, _32 = (np.uint64(bits) for bits in (27, 30, 31, 32))


def key(*words: int | npt.NDArray[np.int64]) -> _Words:
    """Fold words into the key of a permutation: different words give different keys.

    Args:
        words: each an int, of which 64 bits are used, or an array with one for each number to permute.

    Returns:
        Shape ``[1]``, or that of the arrays.

    Example:
        >>> key(7, 1).shape, key(7, np.arange(3)).shape
        ((1,), (3,))
    """
    # Arrays throughout, even of one element: unlike numpy's scalars, they wrap around without a warning.
    folded = np.zeros(1, np.uint64)
    for word in words:
        unsigned = np.array([word % 2**64], np.uint64) if isinstance(word, int) else word.astype(np.uint64)
        folded = _mix((folded ^ unsigned) + _GOLDEN)
    return folded


def permute(
    numbers: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], keys: _Words
) -> npt.NDArray[np.int64]:
    """Return each number's place in the permutation that its size (at most 2**62) and key select.

    Args:
        numbers: shape ``[count]``, from 0 to below the size.
        sizes: shape ``[count]``, the size of each number's permutation.
        keys: shape ``[count]``, or ``[1]`` for all; made by :func:`key`.

    Example:
        >>> permute(np.arange(6), np.full(6, 6), key(0))
        array([5, 1, 3, 2, 0, 4])
    """
    x, size = numbers.astype(np.uint64), sizes.astype(np.uint64)
    own = np.broadcast_to(keys, x.shape)
    # An even number of columns, as rotating a row by one is an odd permutation then; even permutations alone
    # would reach only half of all.
    columns = np.uint64(2) * np.ceil(np.sqrt(size) / 2).astype(np.uint64)
    rows = (size + columns - np.uint64(1)) // columns
    walking = np.arange(len(x))
    while len(walking):
        at = x[walking], columns[walking], rows[walking], own[walking]
        x[walking] = _rotate(*at)
        walking = walking[x[walking] >= size[walking]]
    return x.astype(np.int64)


def _rotate(x: _Words, columns: _Words, rows: _Words, keys: _Words) -> _Words:
    row, column = np.divmod(x, columns)
    for number in range(_ROUNDS):
        column = (column + _draw(keys, 2 * number, row, columns)) % columns
        row = (row + _draw(keys, 2 * number + 1, column, rows)) % rows
    cell: _Words = row * columns + column
    return cell


def _draw(keys: _Words, draw: int, line: _Words, below: _Words) -> _Words:
    """Draw an amount for a row or column: output ``draw * 2**32 + line`` of a SplitMix64 seeded ``keys``."""
    counter = line + np.uint64((draw << 32) + 1)
    amount: _Words = ((_mix(keys + counter * _GOLDEN) >> _32) * below) >> _32
    return amount


def _mix(words: _Words) -> _Words:
    """SplitMix64's output function: each bit of a word changes about half the bits of the result."""
    words = (words ^ (words >> _30)) * _MIX1
    words = (words ^ (words >> _27)) * _MIX2
    return words ^ (words >> _31)
