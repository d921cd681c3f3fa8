"""Requests to this machine's server, with the standard library alone, so that a command answers at once."""

from __future__ import annotations

import http.client
import json
from typing import Any

from hotset.server.pidfile import Place, ServerError, find, is_claimed, read_token

__all__ = ["Client", "client", "no_server"]

# Freeing memory takes the kernel a while, and each change may free some: the stop that of all sessions, and a
# new session that of those that have expired. All else is answered at once, unless the server is stopped.
_SECONDS, _FREEING_SECONDS = 10.0, 60.0


class Client:
    """Sends requests to a server, with the token from the runtime folder."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._token = read_token(place.port)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request and return the answer's JSON.

        Raises:
            ServerError: the server refuses the request (with its own sentence), or does not answer.
        """
        port = self.place.port
        seconds = _SECONDS if method == "GET" else _FREEING_SECONDS
        connection = http.client.HTTPConnection(self.place.host, port, timeout=seconds)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            content = json.loads(answer.read())
        except TimeoutError as error:  # the kernel takes connections for a process that is stopped
            raise ServerError(
                f"The server on port {port} has not answered for {seconds:.0f} s. If its process is stopped, "
                f"`kill -CONT {self.place.pid}` lets it go on; otherwise see its log, {self.place.log}."
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerError(
                f"The server on port {port} (process {self.place.pid}) does not answer ({error}); "
                f"see its log, {self.place.log}."
            ) from error
        finally:
            connection.close()
        if answer.status >= 400:
            raise ServerError(content["error"])
        return content


def client(port: int) -> Client:
    """Return a client of the server on this port.

    Raises:
        ServerError: there is none, or it is still starting.
    """
    place = find(port)
    if place is None:
        if is_claimed(port):
            raise ServerError(f"The server on port {port} is still starting; try again in a second.")
        raise no_server(port)
    return Client(place)


def no_server(port: int) -> ServerError:
    """Return the error for a port on which no server runs."""
    return ServerError(f"No server runs on port {port}; `hotset start --port {port}` starts one.")
