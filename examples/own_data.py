"""Your own data: a CSV with your columns, text ids and a bad record -> sequences -> model -> recommendation.

python examples/own_data.py
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import nestpipe
from nestpipe.data.ingest import write_sequences
from nestpipe.data.log_reader import LogSource

SCHEMA = nestpipe.Schema(
    user="customer",
    item="product",
    time="when",
    user_encoding="dictionary",  # text ids are numbered; the sequence folder keeps the dictionary
    item_encoding="dictionary",
)


def write_log(path: Path) -> None:
    """200 customers who walk along the shelves, each from another start; the last record has no valid time."""
    lines = ["customer,product,when"]
    for customer in range(200):
        for visit in range(8):
            lines.append(f"c{customer},p{(customer + 3 * visit) % 40},2026-03-{1 + visit:02d}T10:00:00Z")
    path.write_text("\n".join([*lines, "c7,p3,yesterday"]) + "\n")


def main(folder: Path) -> None:
    write_log(folder / "log.csv")
    sequences = write_sequences(folder / "data", schema=SCHEMA, log=LogSource(paths=(str(folder / "log.csv"),)))
    counts = sequences.meta["counts"]
    print(f"read {counts['read']} records: {counts['kept']} kept, {counts['quarantined']} quarantined")

    recipe = nestpipe.recipes.tiny()
    data = replace(recipe.data, path=str(sequences.path), max_len=8, batch_size=32)
    run = nestpipe.train(replace(recipe, data=data, train=replace(recipe.train, epochs=20)), folder / "run", quiet=True)

    predictor = run.predictor()
    print(f"HR@10 {predictor.evaluate(progress=False).scalars()['hr@10']:.2f}")
    print("for customer c7:", predictor.recommend("c7", k=3).items)


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        main(Path(scratch))
