"""Drives endless chat traffic at one or more SGLang servers (or their router), many requests at a time."""

from __future__ import annotations

import asyncio
import copy
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx

from draftloop.core.config import TrafficConfig
from draftloop.core.errors import PromptError, ServerError
from draftloop.generator.prompts import Prompt, endless_passes
from draftloop.generator.results import RequestResult, TrafficStats

_REQUEST_TIMEOUT_S = 600.0
_PAUSE_AFTER_FAILURE_S = 0.2
# A server that dies fails all requests in flight at once; so many failures more, with no success between, end it.
_FAILURES_BEYOND_CONCURRENCY = 5


class TrafficDriver:
    """`config.concurrency` loops, each sending the next prompt to its own server when the last answer is in.

    Request ids are "{domain}--{uuid}", so that a tap in the server can tell the domain. The order of the prompts is
    fixed by `seed`. stream: stream the answers and time the gaps between their pieces.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        prompts: Sequence[Prompt],
        config: TrafficConfig,
        seed: int,
        *,
        stream: bool = False,
        on_result: Callable[[RequestResult], None] | None = None,
    ) -> None:
        if not prompts:
            raise PromptError("there are no prompts to send")
        self._base_urls = [url.rstrip("/") for url in base_urls]
        self._order = endless_passes(prompts, seed)
        self._config = config
        self._stream = stream
        self._on_result = on_result
        self._stats = TrafficStats()
        self._failures_in_a_row = dict.fromkeys(self._base_urls, 0)
        self._stopping = asyncio.Event()
        self._traffic: asyncio.Task[None] | None = None

    def stats(self) -> TrafficStats:
        """A copy of the totals so far."""
        return copy.deepcopy(self._stats)

    async def start(self) -> None:
        """Begin; returns at once."""
        self._traffic = asyncio.create_task(self._run())

    async def wait(self) -> None:
        """Until the traffic ends. Raises ServerError when a server failed every request; `stop` is quiet then."""
        if self._traffic is None:
            return
        try:
            # Whoever gives up waiting does not stop the traffic.
            await asyncio.shield(self._traffic)
        except ServerError:
            self._traffic = None
            raise

    async def stop(self, deadline_s: float = 30.0) -> TrafficStats:
        """Send nothing new, wait `deadline_s` for what is in flight, then cancel it.

        Raises ServerError when a server failed every request and `wait` has not said so.
        """
        self._stopping.set()
        traffic, self._traffic = self._traffic, None
        if traffic is not None:
            await asyncio.wait([traffic], timeout=deadline_s)
            traffic.cancel()
            await asyncio.wait([traffic])
            if not traffic.cancelled():
                traffic.result()
        return self.stats()

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=self._config.concurrency)
        async with httpx.AsyncClient(timeout=_REQUEST_TIMEOUT_S, limits=limits, trust_env=False) as client:
            urls = [self._base_urls[i % len(self._base_urls)] for i in range(self._config.concurrency)]
            loops = [asyncio.create_task(self._loop(client, url)) for url in urls]
            try:
                done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for loop in loops:
                    loop.cancel()
                await asyncio.gather(*loops, return_exceptions=True)
        for loop in done:
            loop.result()

    async def _loop(self, client: httpx.AsyncClient, base_url: str) -> None:
        while not self._stopping.is_set():
            prompt = next(self._order)
            try:
                result = await self._request(client, base_url, prompt)
            except asyncio.CancelledError:
                self._stats.cancelled += 1
                raise
            self._stats.add(result)
            if self._on_result is not None:
                self._on_result(result)
            if result.error is None:
                self._failures_in_a_row[base_url] = 0
                continue
            self._failures_in_a_row[base_url] += 1
            if self._failures_in_a_row[base_url] >= self._config.concurrency + _FAILURES_BEYOND_CONCURRENCY:
                raise ServerError(f"{base_url} fails every request: {result.error}")
            await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

    async def _request(self, client: httpx.AsyncClient, base_url: str, prompt: Prompt) -> RequestResult:
        request_id = f"{prompt.domain}--{uuid.uuid4().hex}"
        body = self._body(prompt, request_id)
        began = time.perf_counter()
        gaps: list[float] = []
        error: str | None = None
        answer: dict[str, Any] = {}
        try:
            if self._stream:
                answer = await _streamed_answer(client, base_url, body, gaps)
            else:
                answer = await post_json(client, f"{base_url}/v1/chat/completions", body)
        except ServerError as err:
            error = str(err)
        usage = answer.get("usage") or {}
        return RequestResult(
            domain=prompt.domain,
            prompt_id=prompt.id,
            request_id=request_id,
            latency_s=time.perf_counter() - began,
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens", 0),
            spec_verify_ct=_verify_steps(answer),
            gaps_s=tuple(gaps),
            error=error,
        )

    def _body(self, prompt: Prompt, request_id: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": "default",
            "messages": list(prompt.messages),
            "rid": request_id,
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_new_tokens,
            # SGLang's extension: verification steps per request, under `sglext`.
            "return_spec_tokens_details": True,
            "stream": self._stream,
        }
        if self._stream:
            body["stream_options"] = {"include_usage": True}
        return body


async def post_json(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST and read a JSON object. Raises ServerError in one line."""
    try:
        response = await client.post(url, json=body)
        _check_status(url, response.status_code, response.text)
        answer = response.json()
    except httpx.HTTPError as err:
        raise ServerError(f"{url}: {_one_line(str(err)) or type(err).__name__}") from None
    except json.JSONDecodeError:
        raise ServerError(f"{url}: the answer is not JSON") from None
    if not isinstance(answer, dict):
        raise ServerError(f"{url}: the answer is a {type(answer).__name__}, not an object")
    return answer


async def _streamed_answer(
    client: httpx.AsyncClient, base_url: str, body: dict[str, Any], gaps: list[float]
) -> dict[str, Any]:
    """The `usage` and `sglext` of a streamed answer; appends the seconds between its pieces to `gaps`."""
    url = f"{base_url}/v1/chat/completions"
    answer: dict[str, Any] = {}
    last: float | None = None
    try:
        async with client.stream("POST", url, json=body) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                _check_status(url, response.status_code, response.text)
            async for event in _events(response):
                if "error" in event:
                    raise ServerError(f"{url}: {_one_line(str(event['error']))}")
                answer.update({key: event[key] for key in ("usage", "sglext") if event.get(key)})
                if any(choice["delta"].get("content") for choice in event.get("choices", ())):
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(now - last)
                    last = now
    except httpx.HTTPError as err:
        raise ServerError(f"{url}: {_one_line(str(err)) or type(err).__name__}") from None
    except json.JSONDecodeError:
        raise ServerError(f"{url}: a streamed piece is not JSON") from None
    return answer


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        data = line.removeprefix("data: ")
        if data != line and data != "[DONE]":
            yield json.loads(data)


def _verify_steps(answer: dict[str, Any]) -> int | None:
    details = (answer.get("sglext") or {}).get("spec_tokens_details")
    return details["spec_verify_ct"] if details else None


def _check_status(url: str, status: int, text: str) -> None:
    if status != httpx.codes.OK:
        raise ServerError(f"{url} answered {status}: {_one_line(text)}")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
