"""The router of Ray Serve that keeps a user at one replica, as a gateway keeps it at one instance.

    X-Session-Id: USER          signal    the user's first replica by rendezvous; the next one if that is overloaded
    X-Session-Id: USER/TICKET   ranking   the replica of the ticket; if that is gone or full, the user's order, in full
    none                        others    any replica

Ray shows a router the session of a request and never its body, so callers say in a header what the body says too. A replica
goes by Ray's name for its process: the one that replaces it has another, takes its share of the users, and knows no old ticket.
Ray's proxy loads this file, so it must not need the model's libraries.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from nestpipe.gateway.router import order_of


class UserRouter(RequestRouter):
    """Sends a request where a gateway would."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas in the order to try them: Ray takes the first that lives and is not full."""
        if not candidate_replicas or pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # if all are full, Ray would ask again without a pause
        found = {one.replica_id.unique_id: one for one in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(one.replica_id) or 0 for name, one in found.items()}
        asked = pending_request.metadata
        return [[found[name]] for name in order_of(asked.session_id, loads, request=asked.internal_request_id)]
