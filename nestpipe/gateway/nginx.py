"""nginx in place of the gateway: a consistent hash on the user, retries on the next instance.

nginx cannot read the user in a JSON body, so callers send a header too; in GET /v1/recommend/{user} it is in the address. The hash
is nginx's own (ketama): use either nginx or gateways for a fleet, because both together would send one user to two instances.
The file is the same for every kind of run: an instance refuses calls that its run does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from nestpipe.errors import ConfigError
from nestpipe.serve.route_headers import USER_HEADER as HEADER


def nginx_config(urls: Sequence[str], *, listen: str = "127.0.0.1:8700", timeout_ms: int = 200) -> str:
    """The configuration file for these instances; raises ConfigError for addresses that nginx cannot use."""
    hosts = [_host_of(url) for url in urls]
    if not hosts:
        raise ConfigError("nginx needs at least one instance; name them with --urls http://HOST:PORT ...")
    servers = "\n".join(f"        server {host} max_fails=1 fail_timeout=2s;" for host in hosts)
    variable = "http_" + HEADER.lower().replace("-", "_")
    return f"""\
# Written by 'nestpipe serve --print-nginx'. Every request of a user carries the user in the header {HEADER}.
worker_processes auto;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    default_type application/json;
    # The user as the header has it: percent-encoded.
    map $request_uri $path_user {{
        default "";
        "~^/v1/recommend/(?<named>[^?]+)" $named;
    }}
    map ${variable} $nestpipe_user {{
        default ${variable};
        "" $path_user;
    }}
    upstream nestpipe {{
        hash $nestpipe_user consistent;
{servers}
        keepalive 64;
    }}
    upstream nestpipe_any {{
        least_conn;
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
        # Answers are idempotent, and so are events by their ids: nginx may repeat a POST once, at the next instance.
        proxy_next_upstream error timeout http_502 non_idempotent;
        proxy_next_upstream_tries 2;
        proxy_next_upstream_timeout {2 * timeout_ms}ms;
        error_page 502 504 =503 @unavailable;
        location @unavailable {{
            return 503 '{{"error": {{"code": "unreachable", "message": "no instance answered in time"}}}}';
        }}
        location ~ ^/v1/(recommend|generate|prefill|rank|release)(/|$) {{
            if ($nestpipe_user = "") {{
                return 400 '{{"error": {{"code": "no_user_header", "message": "send the user in the header {HEADER} too"}}}}';
            }}
            proxy_pass http://nestpipe;
        }}
        # Instances of one machine, or with one database, share their state.
        location ~ ^/v1/(similar|events)$ {{ proxy_pass http://nestpipe_any; }}
        location ~ ^/v1/(items|users)(/|$) {{ proxy_pass http://nestpipe_any; }}
        location = /readyz {{ proxy_pass http://nestpipe_any; }}
        location = /openapi.json {{ proxy_pass http://nestpipe_any; }}
        # An invalidation concerns every instance, and a proxy sends to one: use the instances' own addresses.
        location / {{
            return 404 '{{"error": {{"code": "not_routed", "message": "nginx does not serve this; /openapi.json lists the calls, and invalidate is for each instance"}}}}';
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
