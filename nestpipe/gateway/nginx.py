"""nginx in place of the gateway: a consistent hash on the user's header, retries on the next instance.

nginx cannot read the user in a JSON body, so callers send a header too. The hash is nginx's own (ketama): use either nginx or
gateways for a fleet, because both together would send one user to two instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from nestpipe.errors import ConfigError
from nestpipe.serve.schemas import USER_HEADER as HEADER


def nginx_config(urls: Sequence[str], *, listen: str = "127.0.0.1:8700", timeout_ms: int = 200) -> str:
    """The configuration file for these instances; raises ConfigError for addresses that nginx cannot use."""
    hosts = [_host_of(url) for url in urls]
    if not hosts:
        raise ConfigError("nginx needs at least one instance; name them with --urls http://HOST:PORT ...")
    servers = "\n".join(f"        server {host} max_fails=1 fail_timeout=2s;" for host in hosts)
    variable = "http_" + HEADER.lower().replace("-", "_")
    return f"""\
# Written by 'nestpipe serve --print-nginx'. Every request carries its user in the header {HEADER}.
worker_processes auto;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    upstream nestpipe {{
        hash ${variable} consistent;
{servers}
        keepalive 64;
    }}
    server {{
        listen {listen};
        client_max_body_size 1m;
        client_body_timeout 5s;
        client_header_timeout 5s;
        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_connect_timeout 50ms;
        proxy_read_timeout {timeout_ms}ms;
        # Ranking is idempotent, so nginx may repeat a POST once, at the next instance.
        proxy_next_upstream error timeout http_502 non_idempotent;
        proxy_next_upstream_tries 2;
        proxy_next_upstream_timeout {2 * timeout_ms}ms;
        location ~ ^/v1/(prefill|rank|release)$ {{
            if (${variable} = "") {{
                return 400 '{{"error": {{"code": "no_user_header", "message": "send the user in the header {HEADER} too"}}}}';
            }}
            proxy_pass http://nestpipe;
        }}
        location = /readyz {{ proxy_pass http://nestpipe; }}
        # Events and invalidations concern every instance, and a proxy sends to one: use the instances' own addresses.
        location / {{
            return 404 '{{"error": {{"code": "not_routed", "message": "nginx serves /v1/prefill, /v1/rank and /v1/release"}}}}';
        }}
    }}
}}
"""


def _host_of(url: str) -> str:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if (
        parts.scheme != "http"
        or not parts.hostname
        or port is None
        or not parts.hostname.replace(".", "").replace("-", "").isalnum()
    ):
        raise ConfigError(f"{url!r} is no address of an instance; write http://HOST:PORT.")
    return f"{parts.hostname}:{port}"
