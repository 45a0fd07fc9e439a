"""Signals that are not sent: an instance says for how long it needs none."""

from __future__ import annotations

import asyncio
import json

import httpx

from nestpipe.gateway.instance_client import InstanceClient
from nestpipe.gateway.router import InstanceAddress, Members
from nestpipe.serve.schemas import PrefillRequest
from tests.serve.small_rankers import Clock

REFUSED = {"ticket": None, "admitted": False, "reason": "not_at_risk", "instance": "one", "epoch": "e"}


def test_an_instance_that_needs_no_signals_gets_none_for_as_long_as_it_said():
    one, sent, clock = InstanceAddress(name="one", url="http://one"), [], Clock()

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        sent.append(body["candidates"])
        quiet_s = 1e9 if body["candidates"] > 900 else 1.0
        return httpx.Response(200, json={**REFUSED, "quiet_s": quiet_s})

    async def body() -> None:
        client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        remote = InstanceClient(Members([one]), client, clock=clock)

        async def ask(count: int) -> str:
            asked = PrefillRequest(user=1, request="r", candidates=count)
            return (await remote.prefill(asked, one, timeout_s=5.0)).reason

        assert [await ask(128), await ask(128), await ask(64)] == ["not_at_risk"] * 3
        assert sent == [128], "the others are as little at risk"
        await ask(256)
        assert sent == [128, 256], "but more candidates may be"
        clock.now += 1.01
        await ask(128)
        assert sent == [128, 256, 128]
        await ask(999)
        clock.now += 5.01
        await ask(128)
        assert sent[3:] == [999, 128], "nobody is silenced for good"
        await remote.close()

    asyncio.run(body())
