"""Quickstart: a DataFrame with text ids -> a trained model -> recommendations; half a minute on two cores.

python examples/quickstart.py
"""

import polars as pl

import nestpipe

visits = [(f"user-{u}", f"item-{(u + 3 * n) % 40}", 1_700_000_000 + 3600 * n) for u in range(200) for n in range(8)]
log = pl.DataFrame(visits, schema=["who", "what", "when"], orient="row")

run = nestpipe.fit(log, user="who", item="what", time="when", epochs=20, quiet=True)

print(f"HR@10 on held-out last events: {run.evaluate().scalars()['hr@10']:.2f}")
print("user-0, after", visits[7][1], "->", run.recommend("user-0", k=3)["item"].to_list())
print("like item-21:", run.similar("item-21", k=3)["item"].to_list())
