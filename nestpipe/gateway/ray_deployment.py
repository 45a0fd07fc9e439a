"""Ray Serve in place of the gateway: replicas are instances, and nestpipe.gateway.ray_router routes users to them.

`app` is for Ray's own commands on a cluster that runs; `nestpipe serve RUN --ray N` starts one on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.applications import Starlette

from nestpipe.data.vocabulary import OwnId
from nestpipe.serve.open_instance import open_instance
from nestpipe.serve.open_service import open_run
from nestpipe.serve.request_errors import BadRequestError
from nestpipe.serve.serve_flags import ServeArguments, parse

ROUTER = "nestpipe.gateway.ray_router.UserRouter"
_STOP_S = 10.0


class Replica:
    """An instance in a process of Ray, with the same engine, handlers and limits."""

    def __init__(self, arguments: ServeArguments):
        run = open_run(arguments)
        torch.set_num_threads(arguments.num_threads)
        self._engine, self._instance, _, _ = open_instance(run, arguments, name=serve.get_replica_context().replica_tag)
        self._instance.broadcast = _invalidate_everywhere
        self._engine.start()

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._instance.app()

    def invalidate(self, user: OwnId) -> int:
        """Drops what is cached of a user's history from this replica; returns the number of entries."""
        return self._instance.invalidate(user)

    def __del__(self) -> None:
        """Ray deletes a replica after its last answer."""
        if hasattr(self, "_engine"):  # it may have failed to open its run
            self._engine.stop()


async def _invalidate_everywhere(user: OwnId) -> int:
    """Invalidates a user at every replica."""
    here = serve.get_replica_context()
    handle = serve.get_deployment_handle(here.deployment, here.app_name)
    try:
        return sum(await handle.broadcast("invalidate", user).results_async())
    except Exception as error:
        message = f"not every replica was reached ({type(error).__name__}); send it again."
        raise BadRequestError(message, status=503, code="unreachable") from error


def application(arguments: ServeArguments) -> serve.Application:
    """What Ray runs: `--ray` replicas of a run."""
    engine = arguments.engine
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="nestpipe",
        num_replicas=max(arguments.ray, 1),
        ray_actor_options={"num_cpus": arguments.num_threads},
        # One more than an instance admits, so that the instance answers 429 itself, as without Ray.
        max_ongoing_requests=engine.max_queue + engine.max_batch + 1,
        max_queued_requests=engine.max_queue,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=_STOP_S,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    # On a cluster every machine must have the folders under these paths.
    folders = {name: getattr(arguments, name) for name in ("run", "compare", "retrieval", "rules")}
    return deployment.bind(replace(arguments, **{name: path and path.resolve() for name, path in folders.items()}))


def app(arguments: Mapping[str, str]) -> serve.Application:
    """The same from flags without their dashes: `serve run nestpipe.gateway.ray_deployment:app run=RUN ray=2`."""
    flags = [word for name, value in arguments.items() if name != "run" for word in (f"--{name}", str(value))]
    return application(parse([*filter(None, [arguments.get("run")]), *flags]))
