"""The controller's endpoint: loopback unless configured, every request with the token of the run folder.

    GET  /status
    POST /scale     {"workers": 4}
    POST /rollback  {"version": "v3"}
    POST /promote   {"checkpoint": "/path/to/folder"}
    POST /stop      {}

A refusal is {"error": one line} with status 400, 401, 404 or 409 (a roll-out is under way).
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from draftloop.core.errors import BusyError, DraftloopError, ServerError

CONTROL_FILE = "control.json"
MOST_BODY_BYTES = 1 << 16
CALL_TIMEOUT_S = 60.0

Command = Callable[[dict[str, Any]], dict[str, Any]]


class ControlServer:
    """Serves `status` and the commands in threads of its own. A context manager.

    run_folder: gets control.json (address and token, readable by the owner only) while the server runs.
    """

    def __init__(
        self,
        host: str,
        port: int | None,
        run_folder: Path,
        status: Callable[[], dict[str, Any]],
        commands: Mapping[str, Command],
    ) -> None:
        self._file = run_folder / CONTROL_FILE
        self._token = secrets.token_hex(32)
        handler = _handler(self._token, status, commands)
        try:
            self._server = ThreadingHTTPServer((host, port or 0), handler)
        except OSError as err:
            raise ServerError(
                f"the control endpoint cannot listen on {host}:{port} ({err.strerror}): choose fleet.control_port"
            ) from None
        self.url = f"http://{host}:{self._server.server_address[1]}"

    def __enter__(self) -> ControlServer:
        self._file.unlink(missing_ok=True)
        fd = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump({"url": self.url, "token": self._token}, file)
        threading.Thread(target=self._server.serve_forever, name="draftloop-control", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._file.unlink(missing_ok=True)


def _handler(
    token: str, status: Callable[[], dict[str, Any]], commands: Mapping[str, Command]
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self._allowed():
                self._answer(lambda: status() if self.path == "/status" else None)

        def do_POST(self) -> None:
            if self._allowed():
                command = commands.get(self.path.removeprefix("/"))
                self._answer(lambda: None if command is None else command(self._body()))

        def _allowed(self) -> bool:
            given = self.headers.get("Authorization", "")
            if hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                return True
            self._send(HTTPStatus.UNAUTHORIZED, {"error": f"the token of {CONTROL_FILE} is needed"})
            return False

        def _body(self) -> dict[str, Any]:
            length = int(self.headers.get("Content-Length", 0))
            if length > MOST_BODY_BYTES:
                raise DraftloopError("the request is too long")
            body = json.loads(self.rfile.read(length) or b"{}")
            if not isinstance(body, dict):
                raise DraftloopError("the request is not a JSON object")
            return body

        def _answer(self, act: Callable[[], dict[str, Any] | None]) -> None:
            try:
                answer = act()
            except BusyError as error:
                self._send(HTTPStatus.CONFLICT, {"error": str(error)})
            except DraftloopError as error:
                self._send(HTTPStatus.BAD_REQUEST, {"error": str(error)})
            except (KeyError, TypeError, ValueError) as error:
                self._send(HTTPStatus.BAD_REQUEST, {"error": f"the request lacks or misstates {error}"})
            else:
                found = HTTPStatus.OK if answer is not None else HTTPStatus.NOT_FOUND
                self._send(found, answer if answer is not None else {"error": f"there is no {self.path}"})

        def _send(self, code: HTTPStatus, answer: dict[str, Any]) -> None:
            body = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet: decisions are events."""

    return Handler


def call_controller(run_folder: Path, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask the controller of a run: GET without a body, else POST. Raises ServerError in one line."""
    try:
        control = json.loads((run_folder / CONTROL_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ServerError(
            f"no controller runs in {run_folder}: start draftloop refresh, or name its folder with --out"
        ) from None
    headers = {"Authorization": f"Bearer {control['token']}"}
    method = "GET" if body is None else "POST"
    try:
        response = httpx.request(
            method, f"{control['url']}/{path}", json=body, headers=headers, timeout=CALL_TIMEOUT_S, trust_env=False
        )
        answer: dict[str, Any] = response.json()
    except (httpx.HTTPError, ValueError) as err:
        raise ServerError(
            f"the controller of {run_folder} does not answer ({type(err).__name__}): it was killed; start it again"
        ) from None
    if response.is_error:
        raise ServerError(str(answer.get("error")))
    return answer
