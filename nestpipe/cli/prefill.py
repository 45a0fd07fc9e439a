"""`nestpipe prefill`: stores KV prefixes of a ranker's users, in running instances or without one."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from nestpipe.cli.prefill_arguments import PrefillArguments
from nestpipe.data.vocabulary import OwnId
from nestpipe.errors import ConfigError
from nestpipe.gateway.router import InstanceAddress, Members
from nestpipe.serve.config import EngineConfig
from nestpipe.serve.latency_model import measure_costs
from nestpipe.serve.model import open_served
from nestpipe.serve.nearline_prefill import NearlinePrefill
from nestpipe.serve.open_service import kind_of, open_histories
from nestpipe.serve.own_ids import ServiceIds
from nestpipe.serve.prefix_folder import StoreInUseError
from nestpipe.serve.service_folder import EVENTS
from nestpipe.serve.stored_prefixes import BEHIND, StoredPrefixes, open_stored
from nestpipe.training.run_folder import Run

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

_DEFAULT = "http://127.0.0.1:8751"
_CHUNK, _POLL_S, _LINE_S, _WIDTH = 1000, 0.5, 15.0, 30
_UNLIMITED = 1e9  # milliseconds per second


def main(arguments: PrefillArguments) -> int:
    run = Run.open(arguments.run)
    if kind_of(run) != "ranker":
        raise ConfigError(f"{run.folder} has no KV prefixes; name a run of a ranking recipe such as ml1m_ranking.")
    if arguments.top is not None and arguments.top < 1:
        raise ConfigError(f"--top is {arguments.top}; it must be at least 1.")
    users = _users(run, arguments)
    if arguments.instances:
        return _ask(arguments, users, arguments.instances)
    try:
        stored = open_stored(run.folder / "serve", folder=arguments.folder, cap=arguments.prefix_store_bytes)
    except StoreInUseError:
        return _ask(arguments, users, (_DEFAULT,))
    if stored is None:
        raise ConfigError("--prefix-store-bytes is 0, so nothing can be stored.")
    try:
        return _fill(run, arguments, users, stored)
    finally:
        stored.close()


def _users(run: Run, arguments: PrefillArguments) -> list[OwnId]:
    """Own ids, those with the longest histories first unless a file names them."""
    if arguments.users is not None:
        lines = (line.strip() for line in arguments.users.read_text().splitlines())
        named: list[OwnId] = [line for line in lines if line]
        return named[: arguments.top]
    own = run.sequences
    lengths = np.diff(own.offsets)
    order = np.argsort(-lengths, kind="stable")[: arguments.top]
    return own.vocabulary("user").own_ids(own.users[order[lengths[order] > BEHIND]])


def _fill(run: Run, arguments: PrefillArguments, users: Sequence[OwnId], stored: StoredPrefixes) -> int:
    """Computes in this process, until all is stored."""
    folder, chunk = run.folder / "serve", EngineConfig().chunk
    histories = open_histories(run, folder / EVENTS, arguments.state)
    served = open_served(run, step=arguments.step, folder=folder)
    served.costs = measure_costs(served, histories, chunk=chunk, store=stored.store)
    ids = ServiceIds(lambda: histories.sequences, histories.living)
    work = NearlinePrefill(
        stored, histories, model_of=lambda _: served, chunk=chunk, rate_ms_per_s=arguments.rate or _UNLIMITED
    )
    work.request([ids.user(one) for one in users])
    with _progress(len(work)) as show:
        while len(work):
            show(len(work))
            if not work.run():
                time.sleep(0.01)
        stored.flush()
        show(0)
    counts, store = work.counts, stored.store
    print(
        f"{counts['stored']:,} KV prefixes were stored in {store.folder}, {counts['passed_over']:,} users have none to store; "
        f"{store.used:,} of {store.cap:,} bytes are used"
    )
    return 1 if counts["failed"] else 0


def _ask(arguments: PrefillArguments, users: Sequence[OwnId], urls: Sequence[str]) -> int:
    """Sends users to the instances that own them, and waits until they are done."""
    import httpx

    token = arguments.run / "serve" / "token"
    if not token.exists():
        raise ConfigError(f"{token} does not exist; name the run that 'nestpipe serve' was started with.")
    headers = {"authorization": f"Bearer {token.read_text().strip()}"}
    with httpx.Client(timeout=30.0, trust_env=False, headers=headers) as http:
        states = {url: _call(http, url) for url in urls}
        members = Members(InstanceAddress(name=state["instance"], url=url) for url, state in states.items())
        before = {url: state["nearline"]["rate_ms_per_s"] for url, state in states.items()}
        shares: dict[str, list[OwnId]] = {url: [] for url in urls}
        for user in users:
            shares[members.order(user)[0].url].append(user)
        try:
            for url, own in shares.items():
                for first in range(0, len(own), _CHUNK):
                    _call(http, url, users=own[first : first + _CHUNK], rate_ms_per_s=arguments.rate)
            with _progress(len(users)) as show:
                while left := sum(_call(http, url)["nearline"]["waiting"] for url in urls):
                    show(left)
                    time.sleep(_POLL_S)
                show(0)
        finally:
            if arguments.rate is not None:
                for url, rate in before.items():
                    with suppress(ConfigError):
                        _call(http, url, users=[], rate_ms_per_s=rate)
        for url, state in states.items():
            after = _call(http, url)
            stored = after["nearline"]["stored"] - state["nearline"]["stored"]
            used, cap = after["store"]["used"], after["store"]["cap"]
            print(f"{state['instance']} stored {stored:,} KV prefixes; {used:,} of {cap:,} bytes are used")
    return 0


def _call(http: httpx.Client, url: str, **body: Any) -> dict[str, Any]:
    """The state of an instance, after a request if there is a body; raises ConfigError with its reason."""
    import httpx

    try:
        answer = http.post(f"{url}/prefill", json=body) if body else http.get(f"{url}/state")
        content = answer.json()
        if answer.status_code != 200:
            raise ConfigError(f"{url} refused: {content['error']['message']}")
        if "nearline" not in content:
            raise ConfigError(f"{url} stores no KV prefixes; start it with --prefix-store-bytes above 0.")
        return dict(content)
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{url} did not answer as an instance does ({error!r}); name the admin addresses with --instances."
        ) from None


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A function that shows how many are left: a bar on a terminal, a line every 15 s elsewhere."""
    began = said = time.monotonic()
    moves = sys.stderr.isatty()

    def show(left: int) -> None:
        nonlocal said
        now, done = time.monotonic(), max(total - left, 0)
        if not moves and now - said < _LINE_S:
            return
        filled = _WIDTH * done // max(total, 1)
        left_s = (now - began) * left / done if done and left else 0.0
        ahead = f", about {left_s:.0f} s left" if left_s else ""
        line = f"prefill [{'#' * filled}{'.' * (_WIDTH - filled)}] {done:,} of {total:,} users{ahead}"
        print(f"\r{line}\x1b[K" if moves else line, end="" if moves else "\n", file=sys.stderr, flush=True)
        said = now

    try:
        yield show
    finally:
        if moves:
            print(file=sys.stderr)
