"""The router of Ray Serve that keeps a user at one replica, as a gateway keeps it at one instance.

    X-Session-Id: USER          hint      the user's first replica by rendezvous hash; the next one if that is overloaded
    X-Session-Id: USER/TICKET   ranking   the replica of the ticket; if that is gone or full, the user's order, in full
    none                        others    any replica

A router of Ray sees the session of a request but not its body, so callers send the routing key as a header. A replica's name is
Ray's name of its process: its replacement has another name, takes its share of the users, and knows no old ticket.
Ray's proxy imports this file, so it should not need the model's libraries.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from nestpipe.gateway.router import order_of


class UserRouter(RequestRouter):
    """Routes a request as a gateway does."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas in the order to try them: Ray takes the first that lives and is not full."""
        if not candidate_replicas or pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # if all are full, Ray retries without a pause otherwise
        replicas = {one.replica_id.unique_id: one for one in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(one.replica_id) or 0 for name, one in replicas.items()}
        request = pending_request.metadata
        return [[replicas[name]] for name in order_of(request.session_id, loads, request=request.internal_request_id)]
