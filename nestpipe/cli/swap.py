"""`nestpipe swap`: another model for instances that run, or for a share of their users."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from nestpipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SwapArguments:
    run: tyro.conf.Positional[Path]
    """Folder of the run that 'nestpipe serve' was started with; its token is there."""
    new: tyro.conf.Positional[Path | None] = None
    """Folder of the run to serve from now on; on the same sequence folder."""
    step: int | None = None
    """Checkpoint of it [default: the best one if the run validated, else the latest]."""
    share: float | None = None
    """Compare: only this share of the users (0 .. 1, by a hash) gets the new model; 0 ends the comparison."""
    host: str = "127.0.0.1"
    """As --admin-host given to 'nestpipe serve'."""
    admin_port: int = 8751
    """As given to 'nestpipe serve'."""
    instances: int = 0
    """As given to 'nestpipe serve': each instance is told, one after the other."""
    timeout_s: float = 600.0
    """How long one instance may take to load, test and measure the model."""


def main(argv: list[str]) -> int:
    text = (
        "Loads a checkpoint into running instances, which test it against itself and then serve new requests with it. Requests "
        "under way are ended with the old model; docs/how-to/serve.md says more.\n\nExample: nestpipe swap runs/ranking runs/better"
    )
    arguments = tyro.cli(SwapArguments, prog="nestpipe swap", description=text, args=argv)
    token = arguments.run / "serve" / "token"
    if not token.exists():
        raise ConfigError(f"{token} is not there: name the run that 'nestpipe serve' was started with.")
    if arguments.new is None and arguments.share is None:
        raise ConfigError("name the run to serve from now on: nestpipe swap RUN NEW.")
    body: dict[str, Any] = {"run": str(arguments.new.resolve())} if arguments.new else {}
    body |= {"step": arguments.step} if arguments.step is not None else {}
    body |= {"share": arguments.share} if arguments.share is not None else {}
    first = arguments.admin_port
    ports = range(first + 1, first + 1 + arguments.instances) if arguments.instances else [first]
    for port in ports:
        where = f"http://{arguments.host}:{port}/{'swap' if arguments.share is None else 'compare'}"
        said = _post(where, body, token.read_text().strip(), arguments.timeout_s)
        beside = f", {said['compared']} for {said['share']:.0%} of the users" if said["compared"] else ""
        print(f"{said['instance']} serves {said['model']}{beside}", flush=True)
    return 0


def _post(url: str, body: dict[str, Any], token: str, timeout_s: float) -> dict[str, Any]:
    """The state of an instance after a change; raises ConfigError with its own words."""
    import httpx

    try:
        # The token is for nobody else, also not for a proxy of the environment.
        with httpx.Client(timeout=timeout_s, trust_env=False) as http:
            answer = http.post(url, json=body, headers={"authorization": f"Bearer {token}"})
        content = answer.json()
        if answer.status_code != 200:
            raise ConfigError(f"{url} refused: {content['error']['message']}")
        return {name: content[name] for name in ("instance", "model", "compared", "share")}
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{url} gave no answer of an instance ({error!r}); is this its --admin-port?") from None
