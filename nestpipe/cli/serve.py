"""`nestpipe serve`: one instance of a run, a fleet behind a gateway, or replicas under Ray Serve."""

from __future__ import annotations

from nestpipe.cli import importing
from nestpipe.errors import ConfigError
from nestpipe.serve.serve_flags import ServeArguments


def main(arguments: ServeArguments) -> int:
    """Runs until SIGINT or SIGTERM."""
    if arguments.ray:
        from nestpipe.cli.serve_ray import serve_on_ray

        return serve_on_ray(arguments)
    try:
        with importing():
            from nestpipe.cli.serve_fleet import print_nginx, serve_fleet
            from nestpipe.cli.serve_instance import serve_instance
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serving needs the package '{error.name}'; install it with: pip install 'nestpipe[serve]'"
        ) from None
    if arguments.print_nginx:
        return print_nginx(arguments)
    return serve_fleet(arguments) if arguments.instances or arguments.demo else serve_instance(arguments)
