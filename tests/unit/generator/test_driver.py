"""The driver's own mechanics: a dead server, one that never answers, totals. Real servers are in tests/serving."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from draftloop.core.config import TrafficConfig
from draftloop.core.errors import PromptError, ServerError
from draftloop.generator.batch import generate_batch, parse_generation
from draftloop.generator.driver import TrafficDriver
from draftloop.generator.prompts import Prompt
from draftloop.generator.results import RequestResult, TrafficStats

_PROMPTS = [Prompt("chat", ({"role": "user", "content": "hi"},), "p:1")]
_CONFIG = TrafficConfig.model_validate({"concurrency": 4})


def unused_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_server_is_one_error(stream: bool) -> None:
    async def main() -> None:
        results: list[RequestResult] = []
        url = unused_url()
        driver = TrafficDriver([url], _PROMPTS, _CONFIG, 0, stream=stream, on_result=results.append)
        began = time.monotonic()
        await driver.start()
        with pytest.raises(ServerError, match=f"{url} fails every request: .*connection"):
            await driver.wait()
        assert time.monotonic() - began < 5
        stats = await driver.stop()
        assert (stats.ok, stats.failed) == (0, len(results))
        assert 9 <= stats.failed < 20
        assert results[0].request_id.startswith("chat--")

    asyncio.run(main())


def test_stop_says_so_when_nobody_waited() -> None:
    async def main() -> None:
        driver = TrafficDriver([unused_url()], _PROMPTS, _CONFIG, 0)
        await driver.start()
        await asyncio.sleep(1.5)
        with pytest.raises(ServerError, match="fails every request"):
            await driver.stop()
        assert (await driver.stop()).failed >= 9

    asyncio.run(main())


def test_stop_cancels_what_does_not_finish_in_time() -> None:
    async def main() -> None:
        released = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await released.wait()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        driver = TrafficDriver([f"http://127.0.0.1:{port}"], _PROMPTS, _CONFIG, 0)
        await driver.start()
        await asyncio.sleep(0.2)
        began = time.monotonic()
        stats = await driver.stop(deadline_s=0.2)
        assert time.monotonic() - began < 2
        assert (stats.ok, stats.failed, stats.cancelled) == (0, 0, 4)
        released.set()
        server.close()

    asyncio.run(main())


def test_no_prompts_is_an_error() -> None:
    with pytest.raises(PromptError, match="no prompts"):
        TrafficDriver(["http://x"], [], _CONFIG, 0)


def test_totals_by_domain() -> None:
    stats = TrafficStats()
    stats.add(RequestResult("chat", "p", "r", 2.0, 10, 30, 10, (0.1, 0.2)))
    stats.add(RequestResult("chat", "p", "r", 4.0, 10, 20, None))
    stats.add(RequestResult("code", "p", "r", 3.0, 5, 8, 4))
    stats.add(RequestResult("code", "p", "r", 9.0, error="boom"))
    assert (stats.ok, stats.failed, stats.last_error) == (3, 1, "boom")
    assert (stats.prompt_tokens, stats.completion_tokens, stats.median_latency_s) == (25, 58, 3.0)
    assert stats.domains["chat"].accept_length == 3.0
    assert stats.domains["code"].accept_length == 2.0
    assert list(stats.gaps_s) == [0.1, 0.2]


def test_generate_batch_on_a_dead_server() -> None:
    with pytest.raises(ServerError, match=r"/generate: .*connection"):
        asyncio.run(generate_batch(unused_url(), [[1, 2], [3]], 4, domain="heldout", concurrency=1))


def test_parse_generation() -> None:
    meta = {
        "id": "r",
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "e2e_latency": 0.5,
        "spec_verify_ct": 1,
        "output_top_logprobs": [[[-0.1, 7, None], [-2.5, 9, None]], [[-0.2, 8, None], [-2.0, 7, None]]],
    }
    got = parse_generation({"output_ids": [7, 8], "meta_info": meta}, top_logprobs=True)
    assert (got.output_ids, got.spec_verify_ct, got.finish_reason, got.e2e_latency_s) == ((7, 8), 1, "length", 0.5)
    assert got.top2 == (((7, -0.1), (9, -2.5)), ((8, -0.2), (7, -2.0)))
    with pytest.raises(ServerError, match="another layout"):
        parse_generation({"text": "x"}, top_logprobs=False)
    meta["finish_reason"] = {"type": "abort", "message": "too long"}
    with pytest.raises(ServerError, match="aborted r: too long"):
        parse_generation({"output_ids": [], "meta_info": meta}, top_logprobs=False)
