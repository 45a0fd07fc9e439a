"""A generative run as one instance: what `nestpipe serve` does with it."""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass

from nestpipe.serve.config import Limits
from nestpipe.serve.generation_engine import Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerativeAddress:
    """Where an instance listens, what it is called, and what it takes."""

    host: str
    port: int
    admin_host: str
    admin_port: int
    name: str
    token: str
    budget_ms: float
    limits: Limits


def serve_generative(generator: Generator, place: GenerativeAddress) -> int:
    """Answers until a signal; what is under way is answered first."""
    from nestpipe.serve.generation_api import GenerativeInstance
    from nestpipe.serve.server import bind, run_apps

    with bind(place.host, place.port) as public, bind(place.admin_host, place.admin_port) as private:
        port, admin_port = (one.getsockname()[1] for one in (public, private))
        name = place.name or f"{socket.gethostname()}-{port}"
        instance = GenerativeInstance(generator, name=name, budget_ms=place.budget_ms, limits=place.limits)

        def stop() -> None:
            instance.is_draining = True
            with suppress(OSError):  # nobody may be reading any more
                print("stopping: what is under way is answered first", file=sys.stderr, flush=True)

        def started() -> None:
            where = f"http://{place.host}:{port}, admin on port {admin_port} of {place.admin_host}"
            print(f"serving {generator.served.name} as {name} on {where}", flush=True)

        generator.start()
        try:
            apps = [(instance.app(), public), (instance.admin_app(place.token), private)]
            asyncio.run(run_apps(apps, on_stop=stop, started=started))
        finally:
            generator.stop()
    return 0
