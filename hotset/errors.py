"""Every error and warning of hotset, as one tree.

Each message is a sentence that says what happened and what to do. An error is raised only if the user asked
for something that cannot be done. If only the cache does not work (no room, a corrupt file, a dead owner), a
:class:`HotsetWarning` is given, and samples come from the source.

::

    HotsetError
     ├── QuantityError      (ValueError)   "12 parsecs" is not an amount of memory
     ├── ArgumentError      (ValueError)   an argument outside its range, an empty dataset
     ├── StateError         (ValueError)   a loader's state that is damaged, or another loader's
     ├── LossNotFinite      (ArithmeticError)  a loss that is NaN or infinite
     ├── NotCacheable       (TypeError)    the source returns another sample at each reading
     ├── UnsupportedPlatform (OSError)     not Linux
     ├── SegmentError       (OSError)      a segment that is truncated, corrupt, or of another format
     ├── FolderError        (OSError)      the runtime folder is not safe to use
     ├── SessionError       (OSError)      a session that does not exist, or cannot be made
     └── ClusterError       (OSError)      no Ray cluster, or a session that its machines do not share
    HotsetWarning           (UserWarning)  the cache is not used in part; training continues
"""

from __future__ import annotations

__all__ = [
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
]


class HotsetError(Exception):
    """Base of every exception that hotset raises itself."""


class QuantityError(HotsetError, ValueError):
    """A quantity that is not an amount of memory, such as ``"12 parsecs"`` or ``-1``."""


class ArgumentError(HotsetError, ValueError):
    """An argument outside its range, or an empty dataset."""


class StateError(HotsetError, ValueError):
    """A loader cannot resume from this state: it is damaged, or from another dataset, sampler or version."""


class LossNotFinite(HotsetError, ArithmeticError):
    """The loss is NaN or infinite: no later step can repair the network."""


class NotCacheable(HotsetError, TypeError):
    """The source returns another sample at each reading, and its random part cannot be separated."""


class UnsupportedPlatform(HotsetError, OSError):
    """hotset runs on Linux: it needs memfd, ``/proc`` and open-file-description locks."""


class SegmentError(HotsetError, OSError):
    """A segment cannot be used: truncated, corrupt, forged, or written by another format version."""


class FolderError(HotsetError, OSError):
    """The runtime folder, or a file in it, may be accessible to other users."""


class SessionError(HotsetError, OSError):
    """A session does not exist, its name is taken, or it cannot be made with these arguments."""


class ClusterError(HotsetError, OSError):
    """Ray is not installed, no Ray cluster can be reached, or a session there cannot be shared."""


class HotsetWarning(UserWarning):
    """The cache does not work in part: samples come from the source, and training continues."""
