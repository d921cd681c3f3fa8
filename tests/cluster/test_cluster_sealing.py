"""Sealed messages: what one end seals the other opens, once and in order, and nothing else opens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="cryptography, which seals records between machines, is missing")

from hotset.cluster.sealing import SEAL, Credentials, GivenKeys, Sealing, Unsealable, joined

PARTS = [b"a header", b"", b"entries" * 9, b"rows " * 1000]


def ends() -> tuple[Sealing, Sealing]:
    told = Credentials.new(port=7)
    return Sealing(told, serves=False), Sealing(told, serves=True)


def sealed(sealing: Sealing, *parts: bytes) -> bytes:
    return bytes(sealing.seal(joined(parts)))


def opened(sealing: Sealing, message: bytes) -> bytes:
    """What opens in memory of its own, as each message has that is received."""
    return bytes(sealing.open(memoryview(bytearray(message))))


@given(st.lists(st.binary(max_size=300), max_size=5), st.lists(st.binary(max_size=300), max_size=5))
def test_what_is_sealed_opens_at_the_other_end(asked: list[bytes], answered: list[bytes]) -> None:
    client, server = ends()
    for _ in range(2):
        assert opened(server, sealed(client, *asked)) == b"".join(asked)
        assert opened(client, sealed(server, *answered)) == b"".join(answered)


def test_nothing_of_it_is_seen() -> None:
    client, _ = ends()
    one, other = (sealed(client, *PARTS) for _ in range(2))
    assert not any(part and part in one for part in PARTS)
    assert one[SEAL:] != other[SEAL:], "the same message was encrypted alike twice"


def test_a_part_may_lie_where_it_belongs_already() -> None:
    memory = np.zeros(2000, np.uint8)
    rows = memory[SEAL + 6 :][:1000]
    rows[:] = np.arange(1000) % 251
    run = joined([b"header", rows.data, b"end"], memory)
    assert bytes(run[SEAL:]) == b"header" + rows.tobytes() + b"end"
    assert rows.tobytes() == (np.arange(1000) % 251).astype(np.uint8).tobytes()
    assert np.shares_memory(np.frombuffer(run, np.uint8), memory)


def test_a_byte_changed_anywhere_does_not_open() -> None:
    client, server = ends()
    message = sealed(client, b"a header", b"rows" * 5)
    # The first 16 bytes name the connection, which the server looks up.
    for at in range(16, len(message)):
        changed = bytearray(message)
        changed[at] ^= 4
        with pytest.raises(Unsealable):
            opened(server, changed)
    assert opened(server, message) == b"a header" + b"rows" * 5


def test_a_message_of_another_length_does_not_open() -> None:
    client, server = ends()
    message = sealed(client, b"a header", b"rows" * 5)
    for other in (*(message[:size] for size in range(len(message))), message + b"\0", message[SEAL:]):
        with pytest.raises(Unsealable):
            opened(server, other)
    assert opened(server, message) == b"a header" + b"rows" * 5


def test_a_message_opens_once_and_never_after_a_later_one() -> None:
    client, server = ends()
    first, second, third = (sealed(client, bytes([number])) for number in range(3))
    assert opened(server, first) == b"\0"
    with pytest.raises(Unsealable):
        opened(server, first)
    assert opened(server, third) == b"\2", "one that is lost does not stop the others"
    with pytest.raises(Unsealable):
        opened(server, second)


def test_a_message_does_not_open_where_it_comes_from_nor_on_another_connection() -> None:
    client, _ = ends()
    _, stranger = ends()
    message = sealed(client, *PARTS)
    for other in (client, stranger):
        with pytest.raises(Unsealable):
            opened(other, message)


def test_credentials_travel_and_do_not_show_their_secrets() -> None:
    told = Credentials.new(port=40_000)
    assert Credentials.parse(told.packed()) == told
    for secret in (told.password, told.key):
        assert repr(secret) not in repr(told)
        assert secret.hex() not in repr(told)
    with pytest.raises(Unsealable):
        Credentials.parse(told.packed()[:-1])


def asked(credentials: Credentials) -> memoryview:
    """A message of the client that has these."""
    return Sealing(credentials, serves=False).seal(joined([b""]))


def test_a_server_knows_what_it_has_given() -> None:
    given_keys = GivenKeys()
    one, other = given_keys.give(1), given_keys.give(1)
    assert given_keys.admits(one.connection, one.password)
    assert not given_keys.admits(one.connection, other.password)
    assert not given_keys.admits(b"x" * 16, one.password)
    assert given_keys.of(asked(one)) is not given_keys.of(asked(other))
    for unknown in (memoryview(b""), memoryview(b"short"), asked(Credentials.new(1))):
        with pytest.raises(Unsealable):
            given_keys.of(unknown)


def test_of_more_connections_than_a_server_remembers_the_unused_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hotset.cluster.sealing._MOST", 2)
    given_keys = GivenKeys()
    used, unused = given_keys.give(1), given_keys.give(1)
    given_keys.of(asked(used))
    given_keys.give(1)
    assert given_keys.admits(used.connection, used.password)
    assert not given_keys.admits(unused.connection, unused.password)
