"""HTTP client of one SGLang server: health, weight updates, versions. One clear error instead of a traceback."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import httpx

from draftloop.core.errors import ServerError


class ServerClient:
    """Synchronous; one keep-alive connection, so that a swap's five calls cost no handshakes."""

    def __init__(self, base_url: str, timeout_s: float = 120.0) -> None:
        self.base_url = base_url
        self._http = httpx.Client(base_url=base_url, timeout=timeout_s)

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def healthy(self) -> bool:
        try:
            return self._http.get("/health", timeout=5.0).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST and return the JSON answer. Raises ServerError when the server is gone or says no."""
        answer = self._call("POST", path, body)
        if answer.get("success") is False:
            raise ServerError(f"{self.base_url}{path}: {answer.get('message', 'refused without a reason')}")
        return answer

    def get(self, path: str) -> dict[str, Any]:
        """GET and return the JSON answer. Raises ServerError when the server is gone or says no."""
        return self._call("GET", path)

    def draft_checksums(self, skip: tuple[str, ...]) -> dict[str, str]:
        """Checksum of each tensor of the running drafter, by SGLang's `/weights_checker`; `skip`: name parts."""
        answer = self.post(
            "/weights_checker", {"action": "checksum", "selector": "draft", "skip_tensor_list": list(skip)}
        )
        prefix = "draft."
        checksums: dict[str, str] = answer["ranks"][0]["checksums"]
        return {name.removeprefix(prefix): value for name, value in checksums.items()}

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.HTTPError as err:
            raise ServerError(
                f"SGLang server {self.base_url} does not answer {path} ({type(err).__name__}); see its log"
            ) from err
        try:
            answer: dict[str, Any] = response.json()
        except ValueError:
            answer = {}
        if response.is_error and answer.get("success") is not False:
            detail = " ".join(response.text.split())[:200]
            raise ServerError(f"SGLang server {self.base_url}{path} answered {response.status_code}: {detail}")
        return answer
