"""Serve the viewer on this machine: pages, JSON, frames decoded on demand, and the videos of a run's tasks.

    browser ──token──> cookie ──> /static, /api, /frame, /media ──threads──> Library ──> index and files of the runs

Every request needs the token: in the address that the command prints, afterwards in a cookie. No request names a file:
frames and media are numbers of an episode, so only files that a run refers to are served. The Content-Security-Policy
allows scripts and requests of this server alone, and Trusted Types forbid turning text into HTML; texts of models and
files are JSON, which the page shows as text.
"""

import importlib
import logging
import mimetypes
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from saccade.errors import RunError, SaccadeError, convert_errors
from saccade.media.cache import CachingMediaLoader
from saccade.media.image import encode_png
from saccade.reporting.episode_view import encode_thumbnail
from saccade.reporting.viewer.asking import ASKED, Questions
from saccade.reporting.viewer.episodes import StoredEpisode, list_images
from saccade.reporting.viewer.index import EpisodeIndex
from saccade.reporting.viewer.library import Library, UnknownItemError
from saccade.reporting.viewer.parameters import InvalidParameterError, check_parameters
from saccade.reporting.viewer.plain_json import dump_json
from saccade.utils.files import open_file

STATIC_FOLDER = Path(__file__).parent / "static"
REFRESH_SECONDS = 2.0  # between two looks at the files of the runs
MAX_UPLOAD = 4 * 2**30  # bytes of a file
MAX_PIXELS_CACHED = 256 * 2**20  # bytes
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; media-src 'self' blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
MEDIA_TYPES = ("video/", "image/")  # anything else is sent as bytes; an SVG image could hold scripts
Endpoint = Callable[[Request], Awaitable[Response]]
_logger = logging.getLogger("saccade")


class TokenGuard:
    """Middleware that refuses every request without the token, and adds the security headers to every response."""

    def __init__(self, app: ASGIApp, *, token: str, cookie: str) -> None:
        self._app, self._token, self._cookie = app, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)

        async def send_secured(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        given = request.query_params.get("token")
        if given is not None and self._is_token(given):
            response: ASGIApp = RedirectResponse(request.url.path, status_code=303)
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")  # type: ignore[attr-defined]
        elif self._is_token(request.cookies.get(self._cookie, "")):
            response = self._app
        else:
            response = PlainTextResponse("Open the address that `saccade view` printed: it holds the token.", 403)
        await response(scope, receive, send_secured)

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode("utf-8", "replace"), self._token.encode())


class JSONResponse(Response):
    """Plain values as JSON: without NaN, which browsers don't read, and without control characters in texts."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the JSON of plain values."""
        return dump_json(content).encode("utf-8", "replace")


class Viewer:
    """The endpoints of the application."""

    def __init__(self, library: Library, questions: Questions | None = None) -> None:
        self._library, self._questions = library, questions
        self._loader = CachingMediaLoader(memory_bytes=MAX_PIXELS_CACHED)
        self._is_closed = threading.Event()

    def build_app(self, token: str, cookie: str) -> Starlette:
        """Return the application."""
        queries = {
            "settings": lambda request: {"ask": None if self._questions is None else self._questions.model},
            "asked": lambda request: self._require_questions().describe(_get(request, "ref")),
            "runs": lambda _: self._library.list_runs(),
            "curves": self._build_curves,
            "tables": lambda request: self._library.build_tables(_get(request, "run")),
            "differences": lambda request: self._library.find_differences(request.query_params.getlist("run")),
            "benchmarks": lambda request: self._library.build_benchmarks(_get(request, "run")),
            "facets": lambda request: self._library.list_facets(_get(request, "run")),
            "steps": lambda request: self._get_index(request).list_steps(),
            "episodes": self._list_episodes,
            "position": self._find_position,
            "step": lambda r: self._get_index(r).list_outcomes(_get(r, "stage"), _get_int(r, "step", 0)),
            "advantages": lambda request: self._library.compute_advantages(
                _get(request, "run"), _get(request, "stage"), _get_int(request, "step", 0)
            ),
            "episode": lambda r: self._library.describe_episode(_get(r, "run"), _get(r, "ref")),
            "tokens": lambda r: self._library.describe_tokens(_get(r, "run"), _get(r, "ref")),
            "compare": lambda request: self._library.compare(*_get_sides(request)),
            "paired": lambda request: self._library.compare_evaluations(*_get_sides(request)),
        }
        # Files are not compressed: their ranges count the bytes on disk.
        compress = Middleware(GZipMiddleware, minimum_size=2000, compresslevel=3)
        routes = [Route(f"/{name}", _answer(query)) for name, query in queries.items()]
        return Starlette(
            routes=[
                Route("/", self._send_page),
                Mount("/api", routes=routes, middleware=[compress]),
                Route("/frame", _send(self._build_frame)),
                Route("/media", _send(self._build_media)),
                Route("/ask/file", self._receive_file, methods=["POST"]),
                Route("/ask/question", self._stream_answer, methods=["POST"]),
                Mount("/static", StaticFiles(directory=STATIC_FOLDER)),
            ],
            middleware=[Middleware(TokenGuard, token=token, cookie=cookie)],
        )

    async def _send_page(self, request: Request) -> Response:
        return FileResponse(STATIC_FOLDER / "index.html", headers={"Cache-Control": "no-store"})

    # ---- queries, in threads ---------------------------------------------------------------------------------------

    def _build_curves(self, request: Request) -> Any:
        names, stage = request.query_params.getlist("run"), request.query_params.get("stage", "rl")
        return self._library.build_curves(names, stage, has_bands=request.query_params.get("bands") == "1")

    def _list_episodes(self, request: Request) -> Any:
        query = request.query_params
        total, rows = self._get_index(request).list_episodes(
            dict(query),
            sort=query.get("sort", ""),
            offset=_get_int(request, "offset", 0),
            limit=_get_int(request, "limit", 100),
        )
        return {"total": total, "rows": rows}

    def _find_position(self, request: Request) -> Any:
        query, index = request.query_params, self._get_index(request)
        return {"position": index.find_position(_get(request, "ref"), dict(query), query.get("sort", ""))}

    def _get_index(self, request: Request) -> EpisodeIndex:
        return self._library.get(_get(request, "run")).index

    # ---- questions -------------------------------------------------------------------------------------------------

    def _require_questions(self) -> Questions:
        if self._questions is None:
            raise UnknownItemError("the viewer was started without --ask MODEL", key="ask")
        return self._questions

    async def _receive_file(self, request: Request) -> Response:
        try:
            check_parameters(request.query_params.multi_items())
            number, path = self._require_questions().create_file(_get(request, "name"))
            size = 0
            with open_file(path, "wb") as file:
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > MAX_UPLOAD:
                        raise UnknownItemError(
                            f"files of more than {MAX_UPLOAD >> 30} GiB are not accepted", key="size"
                        )
                    file.write(chunk)
        except (SaccadeError, OSError) as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({"number": number})

    async def _stream_answer(self, request: Request) -> Response:
        try:
            check_parameters(request.query_params.multi_items())
            questions, text = self._require_questions(), _get(request, "question")
            numbers = [int(number) for number in request.query_params.getlist("file")]
        except (SaccadeError, ValueError) as error:  # ValueError: a file without a number
            return JSONResponse({"error": str(error)}, 400)
        lines = (dump_json(event) + "\n" for event in questions.stream(text, numbers))
        return StreamingResponse(lines, media_type="application/x-ndjson")

    def _read(self, request: Request) -> StoredEpisode:
        run, ref = _get(request, "run"), _get(request, "ref")
        if run != ASKED:
            return self._library.read(run, ref)[0]
        stored = self._require_questions().find(ref)
        if stored is None:
            raise UnknownItemError(f"there is no answer {ref!r:.40}", key="ref", value=ref)
        return stored

    # ---- frames and files ------------------------------------------------------------------------------------------

    def _build_frame(self, request: Request) -> Response:
        stored = self._read(request)
        images, number = list_images(stored.episode), _get_int(request, "image")
        if number >= len(images):
            raise UnknownItemError(f"the episode has no image {number}", key="image", value=number)
        pixels = self._loader.load_pixels(images[number])
        headers = {"Cache-Control": "private, max-age=3600"}
        if request.query_params.get("size") == "full":
            return Response(encode_png(pixels), media_type="image/png", headers=headers)
        return Response(encode_thumbnail(pixels), media_type="image/jpeg", headers=headers)

    def _build_media(self, request: Request) -> Response:
        stored = self._read(request)
        media, number = stored.episode.task.media, _get_int(request, "number")
        if number >= len(media):
            raise UnknownItemError(f"the task has no file {number}", key="number", value=number)
        path = Path(media[number].path)
        if not os.path.isfile(path):
            raise UnknownItemError(f"{path.name} is missing", key="number", value=number)
        kind = mimetypes.guess_type(path.name)[0] or ""
        is_shown = kind.startswith(MEDIA_TYPES) and kind != "image/svg+xml"
        return FileResponse(path, media_type=kind if is_shown else "application/octet-stream")

    # ---- the index -------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Import what the pages of curves need, which takes seconds, and keep the indexes up to date until `close`."""
        warned = set[str]()
        while not self._is_closed.is_set():
            try:
                self._library.refresh()
            except SaccadeError as error:  # such as a full disk; the next look may succeed
                if str(error) not in warned:
                    _logger.warning("%s", error)
                warned.add(str(error))
            importlib.import_module("saccade.reporting.run_report")  # after the first look, which shows the episodes
            self._is_closed.wait(REFRESH_SECONDS)

    def close(self) -> None:
        """Stop watching, and delete the files of questions."""
        self._is_closed.set()
        if self._questions is not None:
            self._questions.close()


def _get(request: Request, name: str) -> str:
    value = request.query_params.get(name)
    if value is None:
        raise InvalidParameterError(f"the request lacks {name}", key=name)
    return value


def _get_int(request: Request, name: str, default: int | None = None) -> int:
    text = request.query_params.get(name)
    if not text and default is None:
        raise InvalidParameterError(f"the request lacks {name}", key=name)
    return int(text) if text else default or 0  # check_parameters has refused anything else


def _get_sides(request: Request) -> list[tuple[str, str, int]]:
    """Return run, stage or evaluation, and step of both sides of a comparison."""
    return [
        (_get(request, f"{side}_run"), _get(request, f"{side}_stage"), _get_int(request, f"{side}_step", 0))
        for side in ("first", "second")
    ]


def _send(build: Callable[[Request], Response]) -> Endpoint:
    """Return an endpoint that builds its response in a thread; an error becomes a status and a sentence.

    What can't be shown of a run is no error of the server (409): its files are damaged, or of another version.
    """

    def build_checked(request: Request) -> Response:
        check_parameters(request.query_params.multi_items())
        with convert_errors(RunError, f"{request.url.path.lstrip('/')} can't show what the run holds"):
            return build(request)

    async def respond(request: Request) -> Response:
        try:
            return await run_in_threadpool(build_checked, request)
        except InvalidParameterError as error:
            return JSONResponse({"error": str(error)}, 400)
        except UnknownItemError as error:
            return JSONResponse({"error": str(error)}, 404)
        except SaccadeError as error:
            _logger.debug("%s", error, exc_info=True)
            return JSONResponse({"error": str(error)}, 409)

    return respond


def _answer(query: Callable[[Request], Any]) -> Endpoint:
    return _send(lambda request: JSONResponse(query(request), headers={"Cache-Control": "no-store"}))


class _Server(uvicorn.Server):
    """A server that calls `on_stop` before it waits for the requests in progress."""

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down."""
        self._on_stop()
        await super().shutdown(sockets)


class ViewerServer:
    """A server of a library, bound to an address: `address` holds the token, `run` serves until `stop` or Ctrl-C.

    Port 0 is any unused one; `on_stop` ends what requests wait for. Raises RunError if the address can't be bound.
    """

    def __init__(
        self,
        library: Library,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        questions: Questions | None = None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            self._socket.listen(64)
        except OSError as error:
            self._socket.close()
            reason = (error.strerror or str(error)).lower()
            message = f"{host}:{port} can't be bound: {reason}; choose another --port or --host"
            raise RunError(message, key="port", value=port) from error
        token, number = secrets.token_urlsafe(16), self._socket.getsockname()[1]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{number}/?token={token}"
        self._viewer = Viewer(library, questions)
        app = self._viewer.build_app(token, f"saccade_{number}")
        config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", server_header=False)
        self._server = _Server(config, on_stop)

    def run(self) -> None:
        """Serve, and keep the indexes up to date."""
        watcher = threading.Thread(target=self._viewer.watch, name="saccade-index", daemon=True)
        watcher.start()
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.close()

    def stop(self) -> None:
        """End `run`, which another thread called."""
        self._server.should_exit = True

    def close(self) -> None:
        """Release the address."""
        self._viewer.close()
        self._socket.close()
