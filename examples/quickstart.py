"""Train and recommend in a minute: generated log -> sequences -> model -> evaluation -> ten items for a user.

python examples/quickstart.py
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import rich

import nestpipe
from nestpipe.data.synthetic_sequences import SyntheticConfig, ingest_synthetic


def main(folder: Path) -> None:
    # 1. A log becomes a sequence folder. Your own log: examples/own_data.py
    sequences = ingest_synthetic(folder / "data", SyntheticConfig(num_users=1000, num_items=300))

    # 2. A recipe is a plain configuration; change what you like.
    recipe = nestpipe.recipes.tiny()
    config = replace(
        recipe,
        data=replace(recipe.data, path=str(sequences.path)),
        train=replace(recipe.train, epochs=15),
    )
    run = nestpipe.train(config, folder / "run")

    # 3. Evaluate on held-out events, by ranking the whole catalogue, and recommend.
    predictor = run.predictor()
    rich.print(predictor.evaluate())
    user = int(sequences.users[0])
    best = predictor.recommend(user, k=10)
    for item, score in zip(best.items, best.scores, strict=True):
        print(f"user {user}: item {item:4d}  score {score:.3f}")


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        main(Path(scratch))
