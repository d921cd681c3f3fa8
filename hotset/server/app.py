"""The HTTP API: routes, and how an error becomes an answer.

A route is one call of the session service. It runs in a thread of the framework's pool: it reads files.

======================================  ======
an argument that cannot be used         400
no such session, no such path           404
a name that is taken, no room, ...      409
a body that is not of the right form    422
an error of the server's own            500
======================================  ======
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import BackgroundTasks, FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

import hotset
from hotset._warnings import printable
from hotset.errors import HotsetError
from hotset.server import models
from hotset.server.history import History
from hotset.server.metrics import CONTENT_TYPE, Metrics
from hotset.server.session_service import Refusal, SessionService
from hotset.server.views import ResizedView, SessionView
from hotset.session.reports import report_all

__all__ = ["make_app"]

# The guard checks the token before anything else looks at a request; this only describes it.
_BEARER = Security(HTTPBearer(auto_error=False, description="`hotset status --token` prints it."))

_WHY = {
    400: "An argument cannot be used.",
    401: "It needs the token.",
    403: "The host or the origin is not the server's.",
    404: "There is no such session.",
    409: "The present state does not allow it.",
    413: "The body is too long.",
    422: "The body is not of the right form.",
    500: "The server has failed; its log says where.",
}


def make_app(service: SessionService, history: History, page: str, stop: Callable[[], None]) -> FastAPI:
    """Return the API, unguarded.

    ``page`` is what ``GET /`` answers; ``stop`` is called when the answer to ``POST /api/stop`` is out.
    """
    app = FastAPI(
        title="hotset",
        version=hotset.__version__,
        description="The cache server of one machine: sessions, caches, and how they are doing.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=_errors(401, 403, 413, 500),  # of the guard, and where it fails, for every request
    )
    _add_errors(app)
    metrics = Metrics(service.options, report_all)

    @app.get("/", response_class=HTMLResponse)
    def status_page() -> str:
        """The status page."""
        return page

    @app.get("/api/status", response_model=models.Status)
    def status() -> dict[str, Any]:
        """The server, and every session."""
        return service.status()

    @app.get("/api/sessions", response_model=list[SessionView])
    def list_sessions() -> list[dict[str, Any]]:
        """Every session of this user on this machine, oldest first."""
        found: list[dict[str, Any]] = service.status()["sessions"]
        return found

    @app.post(
        "/api/sessions",
        status_code=201,
        response_model=SessionView,
        responses=_errors(400, 409, 422),
        dependencies=[_BEARER],
    )
    def create_session(new: models.NewSession) -> dict[str, Any]:
        """Create a session that this server owns."""
        return service.create(new.model_dump(exclude_unset=True))

    @app.get("/api/sessions/{which}", response_model=SessionView, responses=_errors(404, 422))
    def show_session(which: str) -> dict[str, Any]:
        """One session, by name or number."""
        return service.show(which)

    @app.patch(
        "/api/sessions/{which}",
        response_model=ResizedView,
        responses=_errors(400, 404, 422),
        dependencies=[_BEARER],
    )
    def resize_session(which: str, change: models.Change) -> dict[str, Any]:
        """Change a session's memory limit; caches beyond it are dropped unless they are in use or pinned."""
        return service.resize(which, change.memory)

    @app.delete(
        "/api/sessions/{which}",
        response_model=models.Freed,
        responses=_errors(404, 422),
        dependencies=[_BEARER],
    )
    def destroy_session(which: str) -> dict[str, int]:
        """Destroy a session; jobs that use it go on from their source."""
        return {"freed": service.destroy(which)}

    @app.get("/api/history", response_model=models.History)
    def last_minutes() -> dict[str, Any]:
        """The last ten minutes of each session."""
        return history.view()

    @app.post("/api/stop", response_model=models.Stopped, dependencies=[_BEARER])
    def stop_server(after: BackgroundTasks) -> dict[str, bool]:
        """Destroy the server's sessions, free the memory, and end the server."""
        service.end()
        after.add_task(stop)
        return {"stopped": True}

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {CONTENT_TYPE: {"schema": {"type": "string"}}}}},
    )
    def scrape() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    _require_all_answered(app)
    return app


def _require_all_answered(app: FastAPI) -> None:
    """Have the description say that each answer has all of its fields: those with a default are sent, too."""
    described = app.openapi
    requests = {models.NewSession.__name__, models.Change.__name__}

    def complete() -> dict[str, Any]:
        found = described()
        for name, schema in found["components"]["schemas"].items():
            if name not in requests:
                schema["required"] = list(schema["properties"])
        return found

    app.openapi = complete  # type: ignore[method-assign]


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": models.Error, "description": _WHY[status]} for status in statuses}


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(HotsetError)
    def refused(request: Request, error: HotsetError) -> JSONResponse:
        return _error(error.status if isinstance(error, Refusal) else 400, str(error))

    @app.exception_handler(OSError)
    def out_of_something(request: Request, error: OSError) -> JSONResponse:
        return _error(409, f"The machine does not allow it: {error.strerror or error}.")

    @app.exception_handler(RequestValidationError)
    def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return _error(422, f"The request's {printable(where) or 'body'} cannot be used: {first['msg']}.")

    @app.exception_handler(Exception)
    def failed(request: Request, error: Exception) -> JSONResponse:
        return _error(500, f"The server has failed here ({type(error).__name__}); its log says where.")

    @app.exception_handler(HTTPException)
    def no_such_route(request: Request, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, f"{error.detail}: /openapi.json says what there is.")


def _error(status: int, sentence: str) -> JSONResponse:
    return JSONResponse({"error": sentence}, status_code=status)
