"""Collate functions for samples of variable shape: :func:`pad` and :data:`ragged`."""

from hotset.loader.collate import pad, ragged
from hotset.store.ragged import Ragged

__all__ = ["Ragged", "pad", "ragged"]
