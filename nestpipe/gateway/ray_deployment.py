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

from nestpipe.serve.api import Instance
from nestpipe.serve.open_service import open_engine, open_run
from nestpipe.serve.request_errors import BadRequestError
from nestpipe.serve.schemas import InvalidateReply, InvalidateRequest
from nestpipe.serve.serve_flags import ServeArguments, parse
from nestpipe.serve.service_folder import kept_secret

ROUTER = "nestpipe.gateway.ray_router.UserRouter"
_STOP_S = 10.0


class RayInstance(Instance):
    """An instance that forwards invalidations to every replica."""

    async def _invalidate(self, request: InvalidateRequest) -> InvalidateReply:
        here = serve.get_replica_context()
        handle = serve.get_deployment_handle(here.deployment, here.app_name)
        try:
            found = await handle.broadcast("invalidate", request.user).results_async()
        except Exception as error:
            message = f"not every replica was reached ({type(error).__name__}); send it again."
            raise BadRequestError(message, status=503, code="unreachable") from error
        return InvalidateReply(sum(found))


class Replica:
    """An instance in a process of Ray, with the same engine, handlers and limits."""

    def __init__(self, arguments: ServeArguments):
        run = open_run(arguments)
        torch.set_num_threads(arguments.num_threads)
        self._engine = open_engine(
            run, engine=arguments.engine, trigger=arguments.trigger, step=arguments.step, label=arguments.label
        )
        self._instance = RayInstance(
            self._engine,
            name=serve.get_replica_context().replica_tag,
            secret=kept_secret(run.folder / "serve" / "secret").encode(),
            limits=arguments.limits,
        )
        self._engine.start()

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._instance.app()

    def invalidate(self, user: int) -> int:
        """Drops a user's prefixes from this replica; returns their number."""
        return self._engine.cache.invalidate(user)

    def __del__(self) -> None:
        """Ray deletes a replica after its last answer."""
        self._engine.stop()


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
    # On a cluster every machine must have the folder under this path.
    return deployment.bind(replace(arguments, run=arguments.run and arguments.run.resolve()))


def app(arguments: Mapping[str, str]) -> serve.Application:
    """The same from flags without their dashes: `serve run nestpipe.gateway.ray_deployment:app run=RUN ray=2`."""
    flags = [word for name, value in arguments.items() if name != "run" for word in (f"--{name}", str(value))]
    return application(parse([*filter(None, [arguments.get("run")]), *flags]))
