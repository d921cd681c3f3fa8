"""How big a run is, and where it writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """Sizes of the datasets and of a timing.

    ``quick`` makes everything small: it shows that the benchmarks run, and its figures mean nothing.
    """

    out: Path
    peer_python: str
    quick: bool = False

    @property
    def pairs(self) -> int:
        """Rounds of a comparison; each ratio is the median of so many."""
        return 2 if self.quick else 5

    @property
    def seconds(self) -> float:
        """One timing lasts at least so long."""
        return 0.01 if self.quick else 0.3

    @property
    def images(self) -> int:
        """Rows of 150,528 bytes."""
        return 96 if self.quick else 3_000

    @property
    def shared_images(self) -> int:
        """Rows of 150,528 bytes in the cache that several processes share.

        1.5 GB: what each process takes of its own (blocks, heaps) is a constant, and would hide the answer
        behind a smaller cache.
        """
        return 96 if self.quick else 10_000

    @property
    def small_rows(self) -> int:
        """Rows of 210 bytes and of 1 KB."""
        return 1_000 if self.quick else 60_000

    @property
    def photographs(self) -> int:
        """JPEG files."""
        return 24 if self.quick else 2_000

    @property
    def swept(self) -> int:
        """JPEG files that the sweep trains on: few, as each of its rounds is 54 epochs."""
        return 24 if self.quick else 256

    @property
    def ragged_bytes(self) -> int:
        """Bytes of a ragged dataset in all, of whatever mean length.

        Of 64 MB an epoch takes 8 ms, and a pass over a list of tensors begins in 4 ms.
        """
        return (1 << 20) if self.quick else (512 << 20)

    @property
    def molecules(self) -> int:
        return 500 if self.quick else 20_000

    @property
    def volumes(self) -> int:
        """NIfTI volumes, of which windows hold half: as many as Smart Cache's description has."""
        return 12 if self.quick else 100

    @property
    def volume_side(self) -> int:
        """Voxels of a volume in its plane; crops are half as wide."""
        return 16 if self.quick else 80
