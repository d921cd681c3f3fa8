"""Sealed messages: what one end seals the other opens, once and in order, and nothing else opens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="cryptography, which seals records between machines, is missing")

from hotset.cluster.sealing import Credentials, GivenKeys, Sealing, Unsealable

MESSAGE = [b"a header", b"", b"entries" * 9, b"rows " * 1000]


def ends() -> tuple[Sealing, Sealing]:
    told = Credentials.new(port=7)
    return Sealing(told, serves=False), Sealing(told, serves=True)


def opened(sealing: Sealing, sealed: list[bytes]) -> list[bytes]:
    return [bytes(frame) for frame in sealing.open(sealed)]


@given(st.lists(st.binary(max_size=300), max_size=5), st.lists(st.binary(max_size=300), max_size=5))
def test_what_is_sealed_opens_at_the_other_end(asked: list[bytes], answered: list[bytes]) -> None:
    client, server = ends()
    for _ in range(2):
        assert opened(server, client.seal(asked)) == asked
        assert opened(client, server.seal(answered)) == answered


def test_nothing_of_it_is_seen() -> None:
    client, _ = ends()
    one, other = (b"".join(client.seal(MESSAGE)) for _ in range(2))
    assert not any(frame and frame in one for frame in MESSAGE)
    assert one[40:] != other[40:], "the same message was encrypted alike twice"


@pytest.mark.parametrize("overwrite", [False, True])
def test_memory_is_written_to_only_where_that_is_allowed(overwrite: bool) -> None:
    client, server = ends()
    rows = np.arange(1000) % 251
    sealed = client.seal([b"header", rows.data.cast("B")], overwrite=overwrite)
    assert np.array_equal(rows, np.arange(1000) % 251) != overwrite
    assert opened(server, [bytes(frame) for frame in sealed])[1] == (np.arange(1000) % 251).tobytes()


def test_a_byte_changed_anywhere_does_not_open() -> None:
    client, server = ends()
    sealed = client.seal([b"a header", b"rows" * 5])
    for number, frame in enumerate(sealed):
        # The first 16 bytes name the connection, which the server looks up.
        for at in range(16 if not number else 0, len(frame)):
            changed = bytearray(frame)
            changed[at] ^= 4
            with pytest.raises(Unsealable):
                server.open([*sealed[:number], bytes(changed), *sealed[number + 1 :]])
    assert opened(server, sealed) == [b"a header", b"rows" * 5]


@pytest.mark.parametrize(
    "change",
    [
        lambda seal, one, two: [seal, one],
        lambda seal, one, two: [seal, two, one],
        lambda seal, one, two: [seal, one + two],
        lambda seal, one, two: [seal, one + two[:1], two[1:]],
        lambda seal, one, two: [seal, one, two, b""],
        lambda seal, one, two: [one, two],
        lambda seal, one, two: [seal],
        lambda seal, one, two: [],
    ],
)
def test_frames_put_together_otherwise_do_not_open(change: Callable[..., list[bytes]]) -> None:
    client, server = ends()
    with pytest.raises(Unsealable):
        server.open(change(*client.seal([b"a header", b"rows" * 5])))


def test_a_message_opens_once_and_never_after_a_later_one() -> None:
    client, server = ends()
    first, second, third = (client.seal([bytes([number])]) for number in range(3))
    assert opened(server, first) == [b"\0"]
    with pytest.raises(Unsealable):
        server.open(first)
    assert opened(server, third) == [b"\2"], "one that is lost does not stop the others"
    with pytest.raises(Unsealable):
        server.open(second)


def test_a_message_does_not_open_where_it_comes_from_nor_on_another_connection() -> None:
    client, _ = ends()
    _, stranger = ends()
    sealed = client.seal(MESSAGE)
    for other in (client, stranger):
        with pytest.raises(Unsealable):
            other.open(sealed)


def test_credentials_travel_and_do_not_show_their_secrets() -> None:
    told = Credentials.new(port=40_000)
    assert Credentials.parse(told.packed()) == told
    for secret in (told.password, told.key):
        assert repr(secret) not in repr(told)
        assert secret.hex() not in repr(told)
    with pytest.raises(Unsealable):
        Credentials.parse(told.packed()[:-1])


def test_a_server_knows_what_it_has_given() -> None:
    given_keys = GivenKeys()
    one, other = given_keys.give(1), given_keys.give(1)
    assert given_keys.admits(one.connection, one.password)
    assert not given_keys.admits(one.connection, other.password)
    assert not given_keys.admits(b"x" * 16, one.password)
    assert given_keys.of(Sealing(one, serves=False).seal([b""])) is not given_keys.of(
        Sealing(other, serves=False).seal([b""])
    )
    for unknown in ([], [b"short"], Sealing(Credentials.new(1), serves=False).seal([b""])):
        with pytest.raises(Unsealable):
            given_keys.of(unknown)


def test_of_more_connections_than_a_server_remembers_the_unused_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hotset.cluster.sealing._MOST", 2)
    given_keys = GivenKeys()
    used, unused = given_keys.give(1), given_keys.give(1)
    given_keys.of(Sealing(used, serves=False).seal([b""]))
    given_keys.give(1)
    assert given_keys.admits(used.connection, used.password)
    assert not given_keys.admits(unused.connection, unused.password)
