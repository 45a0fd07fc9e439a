"""`python -m tests.pipeline.edge_table`: the table of edges in docs/concepts/exactness.md, measured on two real ranks."""

from __future__ import annotations

from dataclasses import replace

from tests.pipeline.mutants import broken_edges
from tests.pipeline.toy_training import Case
from tests.rank_pool import close_ranks, run_ranks

WITHOUT = {
    ("read", "read"): "a batch gets the data of another",
    ("read", "keys"): "there is nothing to route",
    ("dense step", "read"): "nothing: bounds how far reading is ahead",
    ("dense step", "keys"): "nothing: bounds how far id routing is ahead",
    ("keys", "retrieve"): "the owner does not know which rows are requested",
    ("write", "retrieve"): "a row is evicted from its table while a batch still uses it; one event to spare, see below",
    ("retrieve", "retrieve"): "counts, admissions and evictions of a later batch come first",
    ("retrieve", "post"): "the positions of the requested rows are unknown",
    ("keys", "post"): "receives of unknown size",
    ("post", "rows"): "a send without its receive",
    ("update", "rows"): "**rows stale by one step**, as with asynchronous prefetch",
    ("dense step", "compute"): "dense weights stale by one step, their gradients overwritten",
    ("rows", "compute"): "computes with rows that have not been sent",
    ("compute", "compute"): "sums in another order; gradients of a micro-batch overwritten",
    ("compute", "grads"): "gradients are sent before they are complete",
    ("grads", "collect"): "adds gradients that have not been sent",
    ("collect", "collect"): "sums in another order; a micro-batch is missing in the update",
    ("grads", "flag"): "flags are read before they are sent",
    ("compute", "dense sum"): "a sum without the last micro-batch",
    ("dense sum", "dense step"): "dense weights stale by one step",
    ("flag", "dense step"): "a non-finite batch reaches the dense weights",
    ("collect", "update"): "an update without the last micro-batch",
    ("flag", "update"): "a non-finite batch reaches the rows",
    ("update", "write"): "rows are written back as they were before the update",
    ("write", "write"): "a batch in which an id had no row releases it last, and the row of the other batch is lost",
    ("collect", "merge"): "sums of a group are sent before they are complete",
    ("merge", "merge"): "an update without the sums of a micro-batch",
    ("merge", "update"): "an update without the other groups",
    ("keys", "keys"): "it is unknown which rows the previous batch uses",
    ("arrive", "compute"): "nothing: both wait for the same messages, but not at the same time",
    ("rows", "arrive"): "waits for messages that have not been sent",
    ("chunk rows", "arrive"): "waits for messages that have not been sent",
    ("post", "chunk rows"): "a send without its receive",
    ("chunk update", "chunk rows"): "**rows without an update**, some of them",
    ("chunk update", "rows"): "**rows without an update**, some of them",
    ("chunk rows", "compute"): "computes with rows that have not been sent",
    ("compute", "chunk grads"): "gradients are sent before they are complete",
    ("chunk grads", "chunk collect"): "adds gradients that have not been sent",
    ("collect", "chunk collect"): "an update without the micro-batches before the last",
    ("chunk collect", "chunk update"): "an update without the last micro-batch",
    ("chunk collect", "chunk merge"): "sums of a group are sent before they are complete",
    ("merge", "chunk merge"): "an update without the sums of the micro-batches before the last",
    ("chunk merge", "chunk update"): "an update without the other groups",
    ("flag", "chunk update"): "a non-finite batch reaches the rows",
    ("chunk update", "write"): "rows are written back as they were before the update",
}


def measured(case: Case) -> dict[str, list[str]]:
    """For each edge, with a prefetch buffer and in place: the verdict on the first forced order that was caught."""
    found: dict[str, list[str]] = {}
    cases = [replace(case, buffered=buffered) for buffered in (True, False)]
    for _, edge, tried in run_ranks(2, broken_edges, cases, deadline_s=1000)[0]:
        order, verdict = next(((order, one) for order, one in tried.items() if one != "equal"), ("", "equal"))
        found.setdefault(edge, []).append(f"{verdict}, {order}" if order == "at will" else verdict)
    return found


if __name__ == "__main__":
    for case in (
        Case(buffered=True),
        Case(buffered=True, depth=2, chunks="shared"),
        Case(buffered=True, groups=2),
        Case(buffered=True, chunks=2),
        Case(buffered=True, chunks=2, groups=2),
    ):
        print("\n| edge | without it | prefetch buffer | in place |\n|---|---|---|---|")
        for edge, verdicts in measured(case).items():
            ends = tuple(one.partition("(")[0] for one in edge.split(" -> "))
            print(f"| {edge.replace('->', '→')} | {WITHOUT[ends]} | {' | '.join(verdicts)} |")
    close_ranks()
