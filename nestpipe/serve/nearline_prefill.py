"""Near-line prefill: an idle engine extends stored KV prefixes when events arrive, and stores those of users who are named.

    events, a folder that has grown  -> follow_events, start_over     users whose stored prefix is behind
    'nestpipe prefill'               -> request                       any users
    an idle step                     -> run                           one chunk of one user, then a write; at a limited rate

It has the lowest priority: one chunk is computed when nothing else is to be done, so a ranking request waits for one chunk at
most. Nothing goes through the memory tiers. What is stored already is passed over, so an interrupted job can be repeated.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nestpipe.data.sequences import truncate
from nestpipe.models.kv_prefix import KVPrefix
from nestpipe.serve.prefill import HistoryInputs, ServedModel
from nestpipe.serve.prefill_policy import TokenBucket
from nestpipe.serve.stored_prefixes import StoredPrefixes
from nestpipe.serve.user_history import UserHistories

_log = logging.getLogger("nestpipe.serve")
_PAUSE_S = 0.01  # while the rate is used up
_BURST_S = 2.0  # of compute that was not used


@dataclass(slots=True, eq=False)
class NearlineTask:
    """A stored prefix that is being extended."""

    inputs: HistoryInputs
    prefix: KVPrefix | None
    since: int  # `PrefixStore.num_forgets` before the events were read


class NearlinePrefill:
    """Used by the engine's thread, or by a thread of its own; `request` and `limit` are for any thread."""

    def __init__(
        self,
        stored: StoredPrefixes,
        histories: UserHistories,
        *,
        model_of: Callable[[int], ServedModel],
        chunk: int,
        rate_ms_per_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._stored, self._histories, self._model_of = stored, histories, model_of
        self._chunk, self._clock = chunk, clock
        self.counts: Counter[str] = Counter()  # stored, passed_over, failed
        self._users: dict[int, None] = {}  # in the order in which they came
        self._lock = threading.Lock()
        self._task: NearlineTask | None = None
        self.limit(rate_ms_per_s)

    def __len__(self) -> int:
        return len(self._users) + (self._task is not None)

    def limit(self, rate_ms_per_s: float) -> None:
        """Sets the compute that it may take, in milliseconds per second."""
        self.rate_ms_per_s = rate_ms_per_s
        self._bucket = TokenBucket(per_s=rate_ms_per_s, most=_BURST_S * rate_ms_per_s, now=self._clock())

    def request(self, users: Iterable[int]) -> None:
        """Stores the prefixes of users, where that pays and they are behind."""
        with self._lock:
            self._users |= dict.fromkeys(users)

    def follow_events(self) -> None:
        """Extends the stored prefixes of users who have new events, if they are behind."""
        if changed := self._histories.take_changed():
            self._note(changed)

    def start_over(self) -> None:
        """After removals, and when the folder may have grown: drops work in flight, and extends whatever is behind."""
        task, self._task = self._task, None
        self._note(self._stored.store.users())
        if task is not None:
            self.request([task.inputs.user])

    def _note(self, users: Iterable[int]) -> None:
        self.request(user for user in users if self._is_stored(user) and self._is_behind(user))

    def run(self) -> bool:
        """One chunk, or one stored prefix; False if there is nothing to do, or the rate is used up."""
        if not len(self) or self._stored.is_busy or self._bucket.level(self._clock()) <= 0:
            return False
        began = time.perf_counter()
        try:
            self._step()
        except Exception:
            _log.exception("a near-line prefill failed; its user is passed over")
            self.counts["failed"] += 1
            self._task = None
        self._bucket.take(1000 * (time.perf_counter() - began), self._clock())
        return True

    def _step(self) -> None:
        if self._task is None:
            self._task = self._next()
        if (task := self._task) is None:
            return
        length = task.inputs.key.length
        if task.prefix is None or task.prefix.key.length < length:
            task.prefix = task.inputs.served.fill(task.inputs, task.prefix, chunk=self._chunk)
        if task.prefix.key.length == length:
            self._task = None
            is_offered = self._stored.offer(task.inputs, task.prefix, since=task.since, dropped=self._retry)
            with self._lock:
                self.counts["stored" if is_offered else "passed_over"] += 1

    def _retry(self, user: int) -> None:
        """A write was dropped with those of others: reads the events anew. From any thread."""
        with self._lock:
            self.counts["stored"] -= 1
            self._users[user] = None

    def _next(self) -> NearlineTask | None:
        """The work of the next user who has any, from what is stored of it."""
        while self._users:
            with self._lock:
                user = next(iter(self._users))
                del self._users[user]
            if not self._is_behind(user):
                self.counts["passed_over"] += 1
                continue
            since, events = self._stored.store.num_forgets, self._histories.of(user)
            last = 0 if events.times is None or not len(events.times) else int(events.times[-1] // 1000)
            inputs = self._model_of(user).prepare(events, last)
            found = self._stored.find(inputs)
            return NearlineTask(inputs, self._stored.read(found).prefix if found else None, since)
        return None

    def _is_stored(self, user: int) -> bool:
        return self._stored.store.peek(self._model_of(user).ranker.made_by, user) is not None

    def _is_behind(self, user: int) -> bool:
        served = self._model_of(user)
        num_events = self._histories.num_events(user)
        kept = num_events - int(truncate(num_events, served.max_len, served.block))
        return not served.ranker.model.anchored and self._stored.is_behind(served, user, kept)


def fill_version(
    stored: StoredPrefixes, histories: UserHistories, served: ServedModel, *, chunk: int, rate_ms_per_s: float
) -> None:
    """Stores the prefixes of a model that is not in use yet, for the users who have stored ones; blocks until it is done.

    Users come in the order of their last use: if not all fit, those who were there last stay.
    """
    work = NearlinePrefill(stored, histories, model_of=lambda _: served, chunk=chunk, rate_ms_per_s=rate_ms_per_s)
    work.request(stored.store.users())
    while len(work):
        if not work.run():
            time.sleep(_PAUSE_S)
        if not len(work):
            stored.flush()  # what is dropped with others meanwhile is requested again
