"""`nestpipe serve RUN`: one instance in this process, which ranks, recommends or generates, on two ports (requests, administration)."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress

import torch

from nestpipe.serve.admin import Admin
from nestpipe.serve.open_instance import open_instance
from nestpipe.serve.open_service import open_run
from nestpipe.serve.serve_flags import ServeArguments
from nestpipe.serve.server import bind, run_apps, run_loop
from nestpipe.serve.service_folder import kept_secret

STOPPING = "stopping: requests in flight are answered first"


def serve_instance(arguments: ServeArguments) -> int:
    """Runs until SIGINT or SIGTERM."""
    run = open_run(arguments)
    torch.set_num_threads(arguments.num_threads)
    with bind(arguments.host, arguments.port) as public, bind(arguments.admin_host, arguments.admin_port) as private:
        port, admin_port = (one.getsockname()[1] for one in (public, private))
        name = arguments.name or f"{socket.gethostname()}-{port}"
        engine, instance, load, file = open_instance(run, arguments, name=name)
        instance.has_page = arguments.page
        token = kept_secret(run.folder / "serve" / "token")
        admin = Admin(instance, engine, token=token, load=load, file=file)
        del run  # whose sequences stay mapped, also those of users that are forgotten later

        def stop() -> None:
            instance.is_draining = True
            with suppress(OSError):  # nobody may be reading any more
                print(STOPPING, file=sys.stderr, flush=True)

        def started() -> None:
            where = f"http://{arguments.host}:{port}, admin on port {admin_port} of {arguments.admin_host}"
            page = f"; open http://{arguments.host}:{port}/ in a browser" if arguments.page else ""
            print(f"serving {engine.versions.main.name} as {name} on {where}{page}", flush=True)

        engine.start()
        try:
            apps = [(instance.app(), public), (admin.app(), private)]
            run_loop(run_apps(apps, on_stop=stop, started=started))
        finally:
            engine.stop()
    return 0
