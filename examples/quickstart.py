"""Quickstart: a DataFrame with text ids -> sequences -> a trained model -> recommendations; half a minute on two cores.

python examples/quickstart.py
"""

from dataclasses import replace
from tempfile import mkdtemp

import polars as pl

import nestpipe
from nestpipe.data.ingest import write_sequences

visits = [(f"user-{u}", f"item-{(u + 3 * n) % 40}", 1_700_000_000 + 3600 * n) for u in range(200) for n in range(8)]
log = pl.DataFrame(visits, schema=["who", "what", "when"], orient="row")
schema = nestpipe.Schema(user="who", item="what", time="when", user_encoding="dictionary", item_encoding="dictionary")

folder = mkdtemp()
sequences = write_sequences(f"{folder}/data", schema=schema, log=log)
recipe = nestpipe.recipes.tiny()  # SASRec, full softmax
data = replace(recipe.data, path=f"{folder}/data", max_len=8, batch_size=32)
run = nestpipe.train(replace(recipe, data=data, train=replace(recipe.train, epochs=20)), f"{folder}/run", quiet=True)

predictor = run.predictor()
names = dict(sequences.texts("item").rows())
print(f"HR@10 on held-out last events: {predictor.evaluate(progress=False).scalars()['hr@10']:.2f}")
print("user-0, after", visits[7][1], "->", [names[item] for item in predictor.recommend(user=0, k=3).items])
