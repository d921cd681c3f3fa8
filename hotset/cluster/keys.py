"""Keys: how a machine is known to the others, and nothing that needs ZeroMQ until a pair is drawn."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Keys"]


class Keys(NamedTuple):
    """A machine's pair of CURVE keys, in Z85 (40 characters each).

    Example:
        >>> len(Keys.new().public)
        40
    """

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> Keys:
        """Draw a pair."""
        import zmq

        return cls(*zmq.curve_keypair())

    def __repr__(self) -> str:
        """The public half alone: keys end up in logs."""
        return f"Keys({self.public.decode()})"
