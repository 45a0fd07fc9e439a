"""`nestpipe swap`: loads another model into running instances, for all users or for a share of them."""

from __future__ import annotations

from typing import Any

from nestpipe.cli.arguments import SwapArguments
from nestpipe.errors import ConfigError


def main(arguments: SwapArguments) -> int:
    token = arguments.run / "serve" / "token"
    if not token.exists():
        raise ConfigError(f"{token} does not exist; name the run that 'nestpipe serve' was started with.")
    if arguments.new is None and arguments.share is None:
        raise ConfigError("name the run to serve from now on: nestpipe swap RUN NEW.")
    body: dict[str, Any] = {"run": str(arguments.new.resolve())} if arguments.new else {}
    body |= {"step": arguments.step} if arguments.step is not None else {}
    body |= {"share": arguments.share} if arguments.share is not None else {}
    if arguments.prefill and arguments.share is not None:
        raise ConfigError("--prefill is for a model that all users get; leave --share out.")
    body |= {"prefill_ms_per_s": arguments.rate} if arguments.prefill else {}
    timeout_s = None if arguments.prefill else arguments.timeout_s
    first = arguments.admin_port
    ports = range(first + 1, first + 1 + arguments.instances) if arguments.instances else [first]
    for port in ports:
        where = f"http://{arguments.host}:{port}/{'swap' if arguments.share is None else 'compare'}"
        state = _post(where, body, token.read_text().strip(), timeout_s)
        compared = f", {state['compared']} for {state['share']:.0%} of the users" if state["compared"] else ""
        print(f"{state['instance']} serves {state['model']}{compared}", flush=True)
    return 0


def _post(url: str, body: dict[str, Any], token: str, timeout_s: float | None) -> dict[str, Any]:
    """The state of an instance after the change; raises ConfigError with its reason."""
    import httpx

    try:
        # The token must not reach a proxy of the environment.
        with httpx.Client(timeout=timeout_s, trust_env=False) as http:
            answer = http.post(url, json=body, headers={"authorization": f"Bearer {token}"})
        content = answer.json()
        if answer.status_code != 200:
            raise ConfigError(f"{url} refused: {content['error']['message']}")
        return {name: content[name] for name in ("instance", "model", "compared", "share")}
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{url} did not answer as an instance does ({error!r}); is this its --admin-port?") from None
