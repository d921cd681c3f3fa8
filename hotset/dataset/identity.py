"""Identity: which dataset, through which cached transforms; how ranks and jobs find each other's cache.

The fingerprint of what is cached is known only once the chains are cut, and cutting reads samples. Processes
that join a cache must read none. So they look the cache up by what is known before: the dataset without its
chains, the leading transforms that are deterministic by declaration or structure, and the names of the
others. (Names only: a rank may seed its random transforms in its own way.) A rank that finds a cache by this
lookup key takes over where it is cut, computes the fingerprint with its own transforms, and joins if it is
the cache's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from hotset.dataset.arguments import CacheArguments
from hotset.dataset.pipeline import Cuts, Pipeline, Source
from hotset.dataset.transform_attributes import with_transforms
from hotset.determinism.chain import leaves
from hotset.determinism.fingerprint.fingerprint import Fingerprint, fingerprint
from hotset.determinism.verdict import name_of, verdict_of

__all__ = ["Identity", "NotShared", "unshareable"]


class NotShared(Exception):
    """The cache cannot be shared with other jobs; the message says why."""


def unshareable(unknowns: Sequence[str]) -> str:
    """A phrase: why a cache with these unknowns belongs to its process alone."""
    return f"{unknowns[0]}, so no other process can recognise it; give it a key= to share the cache"


@dataclass(frozen=True)
class Identity:
    """What is known of a dataset before it is read.

    Attributes:
        base: the digest of the dataset without its chains; the user's ``key=`` if there is one.
        by_key: whether ``base`` is the user's ``key=``.
        lookup_key: the text by which ranks of a job, and jobs of a session, find each other's cache.
        notes: sentences about content that was only sampled, or does not count.
        unknowns: phrases about objects that could not be read: then no other process has this identity.
    """

    base: str
    by_key: bool
    lookup_key: str
    notes: tuple[str, ...] = ()
    unknowns: tuple[str, ...] = ()

    @classmethod
    def of(cls, pipeline: Pipeline, given: CacheArguments) -> Identity:
        """The identity of a dataset, found without reading a sample.

        Raises:
            OSError: see :func:`hotset.determinism.fingerprint.fingerprint.fingerprint`.
        """
        names = [*(attribute.name for attribute in pipeline.attributes), "given"]
        chains = [leaves(chain) for chain in (*(each.chain for each in pipeline.attributes), pipeline.given)]
        counts = [_leading(steps) for steps in chains]
        length, key = len(pipeline.dataset), given.key
        window = None if given.window is None else [str(field) for field in astuple(given.window)]
        settings = (bool(given.strict), given.cut, window)
        if key is not None:
            live = any(count < len(steps) for count, steps in zip(counts, chains, strict=True))
            return cls(key, True, json.dumps(["hotset.cache", key, length, live, *settings]))
        bare = fingerprint(with_transforms(pipeline.dataset, dict.fromkeys(names[:-1])))
        every, parts = [bare], list[Any]()
        for name, steps, count in zip(names, chains, counts, strict=True):
            every.append(fingerprint((), steps[:count]))
            parts.append([name, every[-1].digest, list(map(name_of, steps[count:]))])
        lookup_key = json.dumps(["hotset.cache", bare.digest, length, parts, *settings])
        return cls(bare.digest, False, lookup_key, _all_of(every, "notes"), _all_of(every, "unknowns"))

    def fingerprint(self, pipeline: Pipeline, cuts: Cuts, source: Source) -> Fingerprint:
        """The fingerprint of what is cached: the dataset and its cached transforms, or the user's key."""
        own = Fingerprint(self.base, self.notes, self.unknowns)
        if self.by_key or (not pipeline.attributes and not source.prefix):
            return own
        digest = hashlib.blake2b(digest_size=16)
        names = [attribute.name for attribute in pipeline.attributes]
        steps = fingerprint((source.inner, source.prefix))
        parts = [self.base, json.dumps([names, cuts.where]), steps.digest]
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part.encode())
        both = (own, steps)
        return Fingerprint(digest.hexdigest(), _all_of(both, "notes"), _all_of(both, "unknowns"))


def _all_of(fingerprints: Sequence[Fingerprint], name: str) -> tuple[str, ...]:
    """The phrases of all of them, each once."""
    return tuple(dict.fromkeys(text for each in fingerprints for text in getattr(each, name)))


def _leading(steps: Sequence[Any]) -> int:
    """The number of leading transforms that are known to be deterministic, and to draw nothing."""
    for count, step in enumerate(steps):
        verdict = verdict_of(step)
        if verdict.kind != "deterministic" or verdict.draws:
            return count
    return len(steps)
