"""`python -m tests.pipeline.edge_table [ORDERS]`: the table of edges in docs/consistency.md, measured on two real ranks.

For each kind of edge: what it is for, and how many random orders that break it, and keep everything else, are caught.
"""

from __future__ import annotations

import sys

from nestpipe.pipeline.schedule import Schedule
from tests.pipeline.mutants import random_orders
from tests.pipeline.orders import Edge, edges_of, is_implied
from tests.pipeline.toy import Case
from tests.ranks import close_ranks, run_ranks

WITHOUT = {
    ("read", "read"): "a batch gets the data of another",
    ("read", "keys"): "there is nothing to route",
    ("dense step", "read"): "nothing: bounds how far reading is ahead",
    ("dense step", "keys"): "nothing: bounds how far key routing is ahead",
    ("keys", "retrieve"): "the owner does not know what is asked for",
    ("write", "retrieve"): "a row loses its home while a batch still holds it; one event to spare, see below",
    ("retrieve", "retrieve"): "counts, admissions and victims of a later batch come first",
    ("keys", "post"): "receives of unknown size",
    ("retrieve", "rows"): "rows leave before they are there",
    ("post", "rows"): "a send without its receive",
    ("update", "rows"): "**rows one step old**: what asynchronous prefetch does",
    ("dense step", "compute"): "dense weights one step old, their gradients overwritten",
    ("rows", "compute"): "computes with rows that have not been sent",
    ("compute", "compute"): "sums in another order; gradients of a part wiped",
    ("compute", "grads"): "gradients leave before they are whole",
    ("grads", "collect"): "adds what has not been sent",
    ("collect", "collect"): "another order of sums; a part is missing in the update",
    ("grads", "flag"): "flags are looked at before they are sent",
    ("compute", "dense sum"): "a sum without the last part",
    ("dense sum", "dense step"): "each rank goes its own way",
    ("flag", "dense step"): "a batch that is not finite reaches the dense weights",
    ("collect", "update"): "an update without the last part",
    ("flag", "update"): "a batch that is not finite reaches the rows",
    ("update", "write"): "rows go home as they were before the update",
    ("write", "write"): "a batch for which an id had no row releases it last, and the row of the other is lost",
}


def measured(num_orders: int) -> dict[Edge, list[tuple[int, int]]]:
    """For each edge, with a pool and in place: (caught, tried)."""
    schedule = Schedule.of("nested", 2, depth=1)
    found: dict[Edge, list[tuple[int, int]]] = {
        edge: [] for edge in edges_of(schedule) if not is_implied(schedule, edge)
    }
    names = {str(edge): edge for edge in found}
    for pool in (True, False):
        for name, *counts in run_ranks(2, random_orders, Case(pool=pool), list(names), num_orders, deadline_s=3000)[0]:
            found[names[name]].append((counts[0], counts[1]))
    return found


if __name__ == "__main__":
    print("| edge | without it | pool | in place |\n|---|---|---|---|")
    for edge, counts in measured(int(sys.argv[1]) if len(sys.argv) > 1 else 20).items():
        shown = " | ".join(f"{caught} of {tried}" for caught, tried in counts)
        print(f"| {str(edge).replace('->', '→')} | {WITHOUT[edge.before, edge.after]} | {shown} |")
    close_ranks()
