"""The server of `dreamgym ui`: pages about one replay buffer, for this machine alone."""

import json
import socket
from collections.abc import Callable
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from threading import Lock

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from dreamgym_lg.errors import ConfigurationError, ReplayBufferError
from dreamgym_lg.replay.reader import ReplayReader, stamp
from dreamgym_lg.report import views
from dreamgym_lg.report.curves import by_iteration, draw_run, read_number
from dreamgym_lg.report.pages import create_templates
from dreamgym_lg.text import clean

HOST = "127.0.0.1"
HOSTS = [HOST, "localhost"]
"""Accepted values of a request's Host header. Others come from a foreign site whose name resolves to this machine."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
PAGES: dict[str, Callable[[ReplayReader, views.Query], views.Values]] = {
    "/": views.runs,
    "/run": views.run,
    "/group": views.group,
    "/episodes": views.episodes,
    "/episode": views.episode,
}
_STATUS = {views.NotStored: 404, ConfigurationError: 400, ReplayBufferError: 503}
_drawing = Lock()  # matplotlib's style is global


def create_app(path: Path) -> Starlette:
    """The pages about the replay buffer at `path`, which is never written to.

    If the file cannot be read, the page says so; the next request tries again.
    """
    templates = create_templates(success=views.success, number=read_number)
    templates.globals |= {"link": views.link, "database": path.name}
    static = {"/style.css": ("text/css", ("style.css", "ui.css")), "/live.js": ("text/javascript", ("live.js",))}

    def page(request: Request) -> Response:
        view = PAGES[request.url.path]
        version = stamp(path)  # before the file is read, so that the browser reloads what is stored meanwhile
        with ReplayReader(path) as reader:
            values = view(reader, request.query_params)
        return HTMLResponse(clean(templates.get_template(f"ui_{view.__name__}.html.j2").render(values, stamp=version)))

    def failed(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            status, text = error.status_code, error.detail
        else:
            status, text = next(status for kind, status in _STATUS.items() if isinstance(error, kind)), str(error)
        template = templates.get_template("ui_error.html.j2")
        return HTMLResponse(clean(template.render(status=status, text=text, stamp="")), status_code=status)

    def curves(request: Request) -> Response:
        with ReplayReader(path) as reader:
            metrics = reader.metrics(request.query_params.get("run", ""))
        cached = {"Cache-Control": "private, max-age=3600"}  # the picture's address changes with the metrics
        return Response(_curves(json.dumps(metrics)), media_type="image/png", headers=cached)

    def changed(request: Request) -> Response:
        return PlainTextResponse(stamp(path))

    def file(request: Request) -> Response:
        kind, names = static[request.url.path]
        folder = files("dreamgym_lg") / "templates"
        return Response("\n".join((folder / name).read_text(encoding="utf-8") for name in names), media_type=kind)

    routes = [Route(each, page) for each in PAGES] + [Route(each, file) for each in static]
    return Starlette(
        routes=[*routes, Route("/curves.png", curves), Route("/stamp", changed)],
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=_with_headers),
            Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False),
        ],
        exception_handlers=dict.fromkeys((*_STATUS, HTTPException), failed),
    )


def listen(host: str, port: int) -> socket.socket:
    """A server's socket. Raises `ConfigurationError` for a port that is taken."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigurationError(f"{host}:{port} cannot be listened on ({error.strerror}); give another --port") from None


def serve(path: Path, port: int, *, say: Callable[[str], None]) -> None:
    """Serve the pages on this machine's loopback until Ctrl-C, then raise `KeyboardInterrupt`.

    Args: `port`, 0 for any free one; `say`, called with the address.

    Raises `ReplayBufferError` for a file that cannot be read, `ConfigurationError` for a port that is taken.
    """
    with ReplayReader(path):
        pass  # report an unreadable file now, not in the first page
    _curves("[]")  # the first picture takes matplotlib a second or two
    with listen(HOST, port) as listening:
        say(f"http://{HOST}:{listening.getsockname()[1]}")
        uvicorn.Server(uvicorn.Config(create_app(path), log_level="warning")).run(sockets=[listening])
    raise KeyboardInterrupt  # only a signal ends it, and uvicorn was seen to return without raising that again


@lru_cache(maxsize=32)
def _curves(metrics: str) -> bytes:
    history = by_iteration(json.loads(metrics))
    with _drawing:
        return draw_run(history, {iteration for iteration, _ in views.alarms(history)})


async def _with_headers(request: Request, answer: RequestResponseEndpoint) -> Response:
    """Add `HEADERS` to every response, except those that it sets itself."""
    response = await answer(request)
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    return response
