"""The KV prefixes of an engine in three tiers: device, host and disk. Used by the engine's thread.

fetch     to the device: from the host, from disk, or extended         keep     after an answer: to the host, to disk
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from nestpipe.models.kv_prefix import KVPrefix
from nestpipe.serve.kv_cache import KVCache
from nestpipe.serve.prefill import HistoryInputs, PrefillQueue
from nestpipe.serve.prefix_moves import PrefixMoves
from nestpipe.serve.prefix_store import StoredMatch
from nestpipe.serve.requests import RankingPlan
from nestpipe.serve.stored_prefixes import StoredPrefixes
from nestpipe.serve.user_history import NOBODY, UserHistories

_log = logging.getLogger("nestpipe.serve")


class PrefixTiers:
    """Moves prefixes for requests; `stored` is None without a disk tier."""

    def __init__(
        self, cache: KVCache[KVPrefix], prefills: PrefillQueue, stored: StoredPrefixes | None, moves: PrefixMoves
    ):
        self.cache, self.stored, self._prefills, self._moves = cache, stored, prefills, moves
        self._is_new = True

    def find_stored(self, inputs: HistoryInputs) -> StoredMatch | None:
        """The stored prefix of a history, or of its beginning."""
        return None if self.stored is None else self.stored.find(inputs)

    def invalidate(self, user: int | None = None) -> int:
        """Drops the prefixes of a user, or all, from all tiers and from work in flight; returns their number. From any thread."""
        num = self.cache.invalidate(user)  # before the store: see `_offer`
        return num + (0 if self.stored is None else self.stored.store.forget(user))

    def retain_users(self, histories: UserHistories) -> None:
        """After removals: drops everything in memory, and what is stored of users whose history does not have the events.

        At the start users without any history keep theirs: they send their histories, or 'nestpipe forget' has removed the files.
        """
        self.cache.invalidate()
        if self.stored is None:
            return
        gone, least = histories.living.forgotten, 1 if self._is_new else 0
        self._is_new = False

        def is_kept(user: int, length: int) -> bool:
            num_events = histories.num_events(user)
            return user not in gone and (num_events > length or num_events < least)

        self.stored.store.retain(is_kept)

    def retain_models(self, models: Iterable[Sequence[str]]) -> None:
        """Drops what models that are gone have stored."""
        if self.stored is not None:
            self.stored.store.retain_models(list(models))

    def fetch(self, plan: RankingPlan) -> None:
        """Brings the prefix of a plan to the device and pins it; none if it is lost. Raises what the model raises."""
        match plan.choice.path:
            case "hit_device" | "hit_host":
                plan.pinned = plan.inputs.key
                self.cache.promote(plan.pinned)  # does nothing if it is there, perhaps for another request
                plan.prefix = self.cache.pin(plan.pinned, plan.request)
            case "extend":
                plan.pinned = plan.inputs.key
                plan.prefix = self.cache.pin(plan.pinned, plan.request) or self._longer(plan, plan.prefix)
            case "hit_store":
                plan.pinned = plan.inputs.key
                plan.prefix = self.cache.pin(plan.pinned, plan.request) or self._read(plan)
            case "shorter":
                plan.inputs = plan.inputs.served.shorter(plan.inputs, plan.choice.num_events)

    def _read(self, plan: RankingPlan) -> KVPrefix | None:
        if self.stored is None or plan.stored is None:
            return None
        read, costs = self.stored.read(plan.stored), plan.inputs.served.costs
        costs.observe("read", read.ms - costs.expected("read", plan.stored.key.length, 0))
        return None if read.prefix is None else self._longer(plan, read.prefix)

    def _longer(self, plan: RankingPlan, begun: KVPrefix | None) -> KVPrefix:
        """The prefix from a shorter one, which it replaces if both fit while it is computed."""
        inputs, lease = plan.inputs, None
        if plan.request.since == self.cache.num_invalidations:
            lease = self.cache.reserve(inputs.key, user=inputs.key.user, num_bytes=inputs.num_bytes)
        try:
            is_whole = begun is not None and begun.key == inputs.key
            if is_whole and begun:
                longer = begun.moved(inputs.served.ranker.device)
            else:
                longer = inputs.served.fill(inputs, begun, chunk=inputs.key.length)
        except Exception:
            if lease is not None:
                self.cache.fail(lease)
            raise
        if lease is not None:
            self.cache.finish(lease, longer)
        return longer

    def is_worth_keeping(self, plan: RankingPlan, *, if_it_pays: bool) -> bool:
        """Whether to keep the prefix of a full inference: a hint requested it, or the next request takes half as long."""
        inputs, costs = plan.inputs, plan.inputs.served.costs
        if inputs.user == NOBODY or plan.choice.path != "full" or inputs.served.ranker.model.anchored:
            return False
        pays = costs.halves(inputs.num_events, len(plan.request.items), inputs.num_bytes)
        is_wanted = len(self._prefills) > 0 and self._prefills.of(inputs.key) is not None
        return is_wanted or (pays and if_it_pays)

    def keep(self, plan: RankingPlan) -> None:
        """After the replies: offers the prefix to the store; that of a full inference completes its prefill, or goes to the host."""
        if plan.take_prefix is None:
            if plan.prefix is not None:
                self._offer(plan, plan.prefix)
            return
        key, task = plan.inputs.key, self._prefills.of(plan.inputs.key)
        try:
            if task is not None:
                self._prefills.remove(task)
                self.cache.finish(task.lease, prefix := plan.take_prefix())
                self._offer(plan, prefix)
            elif self.cache.peek_state(key) is None:
                num_bytes, since, made = plan.inputs.num_bytes, plan.request.since, list[KVPrefix]()
                take = plan.take_prefix

                def make() -> KVPrefix:
                    made.append(self._moves.on_host(take()))
                    return made[0]

                if self.cache.keep(key, user=key.user, num_bytes=num_bytes, make=make, since=since):
                    self._offer(plan, made[0])
        except Exception:
            _log.exception("a prefix could not be kept")
            if task is not None:
                self.cache.fail(task.lease)

    def _offer(self, plan: RankingPlan, prefix: KVPrefix) -> None:
        if self.stored is None:
            return
        # Read before the other count, which an invalidation raises first: whichever is missed, the other one is seen.
        since = self.stored.store.num_forgets
        if plan.request.since == self.cache.num_invalidations:
            self.stored.offer(plan.inputs, prefix, since=since)
