"""`nestpipe serve RUN --ray N`: Ray on this machine alone, with Serve's proxy on --host and --port."""

from __future__ import annotations

import os
import signal
import threading

from nestpipe.data.ray_ingest import private_ray_environment
from nestpipe.errors import ConfigError
from nestpipe.serve.open_instance import check_flags
from nestpipe.serve.open_service import open_run
from nestpipe.serve.serve_flags import ServeArguments

_OBJECT_STORE_BYTES = 80 << 20  # about Ray's minimum; no request goes through it


def serve_on_ray(arguments: ServeArguments) -> int:
    """Runs until SIGINT or SIGTERM."""
    check_flags(open_run(arguments), arguments)  # before Ray starts
    os.environ |= private_ray_environment()
    try:
        import ray
        from ray import serve

        from nestpipe.gateway.ray_deployment import application
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--ray needs the package '{error.name}'; install it with: pip install 'nestpipe[ray]'"
        ) from None
    ray.init(
        address="local",
        num_cpus=arguments.ray * arguments.num_threads,
        num_gpus=0,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        logging_level="WARNING",
    )
    try:
        limits = arguments.limits
        longest_s = limits.body_s + limits.deadline_ms / 1000
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": arguments.host, "port": arguments.port, "request_timeout_s": longest_s},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        stopping = threading.Event()
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, lambda *_: stopping.set())
        serve.run(application(arguments), name="nestpipe")
        print(f"{arguments.ray} replicas under Ray Serve on http://{arguments.host}:{arguments.port}", flush=True)
        stopping.wait()
        serve.shutdown()
    finally:
        ray.shutdown()
    return 0
