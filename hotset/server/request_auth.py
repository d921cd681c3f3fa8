"""Authorization: every request passes here before anything else sees it, and every answer on its way out.

========================================  ====  ========================================================
``Host`` is none of the server's names    403   a page of another site, whose name was made to mean
                                                127.0.0.1 (DNS rebinding), sends its own name here
``Origin`` is not the same as ``Host``    403   a page of another site
changes something, without the token      401   any program of another user on this machine
anything but the page, not on loopback,   401   others on the network
without the token
more than 64 KiB of body                  413
========================================  ====  ========================================================

The token is compared in constant time and is read from the ``Authorization`` header alone: a URL ends up in
logs, histories and ``Referer``. Answers may not be kept, framed, sniffed, or run anything but the page's own
script and style, which are known by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
from collections.abc import Iterable

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotset.server.options import Options

__all__ = ["LARGEST_BODY", "Guard", "content_policy"]

LARGEST_BODY = 64 << 10

_NONE = "'none'"
_READS = ("GET", "HEAD")
_NO_TOKEN = (
    "This needs the server's token, as `Authorization: Bearer TOKEN`; `hotset status --token` prints it."
)
_ELEMENT = re.compile(r"<(script|style)(?:\s[^>]*)?>(.*?)</\1>", re.DOTALL | re.IGNORECASE)


def content_policy(page: str) -> str:
    """Return the content security policy under which a page's own scripts and styles work, and no others.

    Example:
        >>> content_policy("<style>p {}</style>").split("; ")[2]
        "style-src 'sha256-SNJDlN1Iy2mnt7DOjQIyDb2LQE6O5PQiSZomcdzawQ4='"
    """
    found: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _ELEMENT.findall(page):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        found[kind.lower()].append(f"'sha256-{digest}'")
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(found['script']) or _NONE}",
            f"style-src {' '.join(found['style']) or _NONE}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


class Guard:
    """An ASGI application that guards another one by the server's token and names, its host and port.

    ``policy`` is the content security policy of every answer.
    """

    def __init__(self, app: ASGIApp, options: Options, token: str, policy: str) -> None:
        self._app = app
        self._token = token.encode()
        self._is_loopback = options.is_loopback
        own = f"[{options.host}]" if ":" in options.host else options.host
        names = {"127.0.0.1", "localhost", "[::1]", own}
        self._names = names | {f"{name}:{options.port}" for name in names}
        self._headers = [
            (b"content-security-policy", policy.encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cache-control", b"no-store"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *self._headers]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            try:
                body = await _read(receive)
            except ClientDisconnect:
                return None  # an incomplete request is ignored
            if body is not None:
                return await self._app(scope, _replay(body, receive), send_with_headers)
            refusal = 413, f"The request's body must be at most {LARGEST_BODY} bytes."
        return await _answer(*refusal, send_with_headers)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and sentence for a request that goes no further."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        host = _one(headers, b"host").lower()
        if host not in self._names:
            return 403, "This server has another host name; use the address that `hotset status` shows."
        origins = [value.decode("latin-1").lower() for key, value in headers if key == b"origin"]
        # A TLS proxy in front makes it https; the name must be the one that was asked for, either way.
        if any(origin not in (f"http://{host}", f"https://{host}") for origin in origins):
            return 403, "Requests from pages of other origins are refused."
        is_page = scope["method"] in _READS and scope["path"] == "/"
        is_free = is_page or (self._is_loopback and scope["method"] in _READS)
        if not is_free and not self._has_token(headers):
            return 401, _NO_TOKEN
        return None

    def _has_token(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        scheme, _, token = _one(headers, b"authorization").partition(" ")
        return scheme.lower() == "bearer" and secrets.compare_digest(token.encode("latin-1"), self._token)


def _one(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str:
    """The value of a header that is there exactly once; otherwise an empty string."""
    values = [value for key, value in headers if key == name]
    return values[0].decode("latin-1") if len(values) == 1 else ""


async def _read(receive: Receive) -> bytes | None:
    """Read the whole body; None if it is too long.

    Raises:
        ClientDisconnect: it has not come whole.
    """
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += bytes(message.get("body", b""))
        if len(body) > LARGEST_BODY:
            return None
        if not message.get("more_body", False):
            return body


def _replay(body: bytes, receive: Receive) -> Receive:
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


async def _answer(status: int, sentence: str, send: Send) -> None:
    body = json.dumps({"error": sentence}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
