"""The tables of docs/performance.md, rendered from benchmarks/results: the last full record of each question.

    python benchmarks/scoreboard.py           # prints the full table
    python benchmarks/scoreboard.py --write   # writes it and the headline rows (headlines.py) into the page and the README

A test compares both with this, so no figure there is typed by hand. A range is 10-90 % over blocks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
Figures = dict[str, Any]
Row = tuple[str, str, str, str]  # question, measured, reference and limit, command


def records(name: str, keep: Callable[[Figures], bool] = lambda settings: True) -> list[dict[str, Any]]:
    """The records of a benchmark whose settings are wanted, oldest first; those of --quick runs do not count."""
    path = RESULTS / f"{name}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for one in lines:
        if one["settings"].pop("split", False) is True:  # as older records call it
            one["settings"]["chunks"] = "shared"
    return [one for one in lines if not one["settings"].get("quick") and keep(one["settings"])]


def figure(found: Figures, key: str) -> str:
    """'1.43x (1.39-1.47)'."""
    low, high = found[f"{key}_range"]
    return f"{found[key]:.2f}x ({low:.2f}-{high:.2f})"


def rows() -> Iterator[Row]:
    for one in records("exchange")[-1:]:
        found, command = one["figures"], "exchange.py"
        limits = f"wire 1.00x; gloo's all_to_all {found['gloo_over_wire']:.2f}x; limit 1.15x"
        yield "row exchange, 8 MiB at 1 Gbit/s, over the wire", figure(found, "over_wire"), limits, command
        title = "the same, receives opened one exchange ahead as the pipeline does"
        yield title, figure(found, "ahead_over_wire"), limits, command
    yield from _tables()
    for dense in ("mlp", "hstu"):
        found = records("train_step", lambda one, dense=dense: one["dense"] == dense and one.get("ranks", 2) == 2)
        latest = {network: one for one in found for network, own in one["figures"].items() if "vs_torchrec" in own}
        for network, one in sorted(latest.items()):
            yield from _train_step(network, one["figures"][network], one["settings"])
    yield from _in_chunks()
    yield from _over_dense()
    yield from _emulated()
    yield from _many_ranks()
    for one in records("auto")[-1:]:
        for cell, found in one["figures"].items():
            reference = (
                f"over plain sequential {figure(found, 'auto_over_sequential')}; best fixed: {found['best_fixed']}"
            )
            yield f"auto over the best fixed mode, {cell}", figure(found, "auto_over_best_fixed"), reference, "auto.py"
    for one in records("attention")[-1:]:
        for shape, found in one["figures"].items():
            reference = f"{found['vs_blocks']:.1f}x blocks; {found['of_sgemm']:.2f} of sgemm"
            yield f"jagged attention {shape} over padded", figure(found, "vs_padded"), reference, "attention.py"
    for one in records("mfu")[-1:]:
        for recipe, found in one["figures"].items():
            reference = f"padded count {found['mfu_padded']:.2f} at fill {found['fill']:.2f}"
            yield f"mfu_effective of a training step, {recipe}", f"{found['mfu_effective']:.2f}", reference, "mfu.py"
    yield from _evaluation()
    yield from _new_items()
    yield from _precision()
    yield from _generative_training()
    yield from _checkpoints()
    yield from _scale()
    from scoreboard_quality import quality_rows
    from scoreboard_serving import overload_rows, relay_rows

    yield from overload_rows()
    yield from relay_rows()
    yield from quality_rows()


def _tables() -> Iterator[Row]:
    for one in records("embedding_step")[-1:]:
        found, command = one["figures"], "embedding_step.py"
        bound = f"row gather alone is {found['of_row_gather']:.2f} of our step"
        yield "embedding step over TBE", figure(found, "speedup_vs_tbe"), bound, command
        yield "embedding step over nn.Embedding(sparse)", figure(found, "speedup_vs_torch_sparse"), bound, command
    for one in records("eviction")[-1:]:
        found = one["figures"]
        for order in ("lru", "lfu"):
            reference = f"{found[f'{order}_ms']['4000000']:.1f} ms of CPU, limit 8 ms; growth limit 2.5x; sorting 0.5M rows in torch {found['torch_ms']:.0f} ms"
            title = f"admission and eviction ({order}), 20,000 ids, 2,000 of them new: full table of 4M rows over 0.5M"
            yield title, figure(found, f"{order}_growth"), reference, "eviction.py"
    for one in records("row_tiers")[-1:]:
        found = one["figures"]
        reference = f"limit 3x, aim 2x; {found['miss_share']:.0%} of the rows are not in the buffer"
        reference += "; bitwise identical" * bool(found["bitwise_equal"])
        yield (
            "rows in files over rows in memory, CPU per row",
            figure(found, "files_over_memory"),
            reference,
            "row_tiers.py",
        )


def _evaluation() -> Iterator[Row]:
    for one in records("evaluation")[-1:]:
        found, own = one["figures"], one["settings"]
        where = f"{own['users']} users x {own['items'] / 1e6:.2f}M items, width {own['width']}, top {own['top']}"
        seconds = f"{found['cpu_s']['ranking']:.2f} s, sgemm {found['cpu_s']['sgemm']:.2f} s; limit 4x"
        yield f"full ranking over the bare sgemm, CPU: {where}", figure(found, "over_sgemm"), seconds, "evaluation.py"
        title = "the same by two ranks: CPU of the busier one over one process"
        yield title, figure(found, "busiest_of_two"), "limit 0.60x", "evaluation.py"


def _new_items() -> Iterator[Row]:
    for one in records("new_items")[-1:]:
        found, command = one["figures"], "new_items.py"
        cold, warm = found["cold_hr10"], found["warm_hr10"]
        where = f"{found['num_cold']:,} targets without a training event, {found['num_items']:,} items"
        mean, low, high = found["cold_over_knn"]
        reference = f"{found['cold_over_chance']:.0f}x chance, limit 10x; content kNN {cold['content kNN']:.4f}, "
        reference += f"model - it {mean:+.4f} [{low:+.4f}, {high:+.4f}]; without item features {cold['without']:.4f}"
        yield f"HR@10 of new items with item features: {where}", f"{cold['with']:.4f}", reference, command
        mean, low, high = found["warm_change"]
        reference = f"without {warm['without']:.4f}, paired change {mean:+.1%} [{low:+.1%}, {high:+.1%}], limit -2%"
        title = f"HR@10 of the other {found['num_warm']:,} targets with item features"
        yield title, f"{warm['with']:.4f}", reference, command


def _precision() -> Iterator[Row]:
    for one in records("precision")[-1:]:
        for recipe, found in one["figures"].items():
            mean, low, high = found["ndcg10_change"]
            title = f"NDCG@10 of {recipe} in bf16 minus fp32, {one['settings']['seeds']} seeds, generated log"
            reference = f"fp32 {found['ndcg10']['fp32']:.4f}, limit: the interval contains 0; "
            reference += f"CPU time {figure(found, 'cpu_ratio')} of fp32"
            yield title, f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]", reference, "precision.py"


def _over_dense() -> Iterator[Row]:
    """A real dense part of some hundred milliseconds: how much everything else adds to it."""
    shared = records("train_step", lambda one: one["dense"] == "hstu" and one.get("ranks", 2) == 2 and _is_shared(one))
    latest = {
        network: (one["settings"], found)
        for one in shared
        for network, found in one["figures"].items()
        if "steady_over_bound" in found and "over_dense_only" in found
    }
    for network, (own, found) in sorted(latest.items()):
        where = f"zipf-{own['samples']}, hstu, {own['micro_batches']} micro-batches, unshared rows apart, {network}"
        reference = f"aim 1.05x; busy {found['busy_share']:.1%}, aim 94%; exposed communication {found['exposed_comm_ms']:.1f} ms, lower bound {found['exposed_comm_floor_ms']:.1f} ms"
        reference += (
            f"; step over the longest of link, CPU and compute stream {found['steady_over_bound']:.3f}x, limit 1.05x"
        )
        command = f"train_step.py --dense hstu --samples {own['samples']} --micro-batches {own['micro_batches']} --chunks shared"
        yield f"step over the dense part alone: {where}", figure(found, "over_dense_only"), reference, command


def _in_chunks() -> Iterator[Row]:
    """The small dense part, where the link is the bottleneck: how close a step comes to it."""
    latest = {}
    for one in records("train_step", lambda one: one["dense"] == "mlp" and one.get("ranks", 2) == 2):
        for network, found in one["figures"].items():
            if one["settings"].get("chunks", 1) not in (1, "shared") and "wire_ms" in found:
                latest[one["settings"]["samples"], network] = one["settings"], found
    for (samples, network), (own, found) in sorted(latest.items()):
        cut = f"--micro-batches {own['micro_batches']} --chunks {own['chunks']}"
        title = f"step over the longest of link, CPU and compute stream: zipf-{samples}, mlp, {own['micro_batches']} micro-batches, {own['chunks']} chunks, {network}"
        reference = f"limit 1.05x; with warm-up {found['step_over_bound']:.3f}x; link busy {found['wire_ms']:.1f} of {found['step_ms']:.1f} ms"
        reference += f"; exposed communication {found['exposed_comm_over_floor']:.2f}x of its lower bound, limit 1.3x"
        reference += "; bitwise identical" * bool(found["bitwise_equal"])
        yield title, f"{found['steady_over_bound']:.3f}x", reference, f"train_step.py --samples {samples} {cut}"


def _emulated() -> Iterator[Row]:
    """Two ranks whose dense part sleeps, so that the cores are not the bottleneck: what the schedule leaves exposed."""
    latest = {}
    for one in records("train_step", lambda one: one["dense"].startswith("sleep:") and one.get("ranks", 2) == 2):
        for network, found in one["figures"].items():
            if "exposed_comm_over_floor" in found:
                emulated_ms = int(one["settings"]["dense"].partition(":")[2])
                latest[one["settings"]["samples"], emulated_ms, network] = one["settings"], found
    for (samples, emulated_ms, network), (own, found) in sorted(latest.items()):
        command = f"train_step.py --dense {own['dense']} --samples {samples} --micro-batches {own['micro_batches']}{_chunks(own)}"
        title = f"exposed communication over its lower bound, unshared rows apart: zipf-{samples}, dense part emulated ({emulated_ms} ms), {network}"
        # A block of few steps includes the pipeline warm-up; its trace does not.
        steady = found["busy_ms"] / found["busy_share"] / (found["step_ms"] / found["step_over_bound"])
        reference = (
            f"{found['exposed_comm_ms']:.1f} ms, lower bound {found['exposed_comm_floor_ms']:.1f} ms; limit 1.3x"
        )
        reference += f"; step over the longest of link, CPU and compute stream {steady:.3f}x, with warm-up {found['step_over_bound']:.3f}x; limit 1.05x; bitwise identical"
        yield title, f"{found['exposed_comm_over_floor']:.2f}x", reference, command


def _many_ranks() -> Iterator[Row]:
    for one in records("weak_scaling")[-1:]:
        yield _weak_scaling(one["figures"], one["settings"])
    for one in records("groups")[-1:]:
        for hosts, found in one["figures"].items():
            others = ", ".join(f"{num}: {each['step_ms']:,.0f} ms" for num, each in found["groups"].items())
            title = f"step with the groups that `--pipeline.groups 0` chooses over the best number, 8 ranks on {hosts}"
            reference = f"groups {others}; limit 1.05x; dense part emulated ({one['settings']['dense_ms']} ms)"
            yield title, figure(found, "auto_over_best"), reference, "groups.py"
    for one in records("simulate")[-1:]:
        found, cases = one["figures"], [each for each in one["figures"].values() if isinstance(each, dict)]
        rest = max(abs(each["error_beyond_dense"]) for each in cases)
        reference = f"worst {found['worst_error']:.1%} (without the dense part {rest:.0%}); limits 10 % and 20 %"
        title = f"median error of `nestpipe simulate`, constants of 2 ranks, {len(cases)} cases of 4 to 16 real ranks"
        yield title, f"{found['median_error']:.1%}", reference, "simulate.py"


def _generative_training() -> Iterator[Row]:
    for one in records("balance")[-1:]:
        found = one["figures"]
        for shape, limit in (("8x8", 0.01), ("6x16", 0.015)):
            by_way = {way: values[0] for way, values in found[f"{shape}, b/a 0.0005"].items()}
            reference = f"fixed shares {by_way['fixed']:.1%}; limit {limit:.1%}; lower bound {by_way['bound']:.2%}"
            title = f"wait for the slowest rank / step, lengths-kuai, {shape} samples x ranks, by the cost model"
            yield title, f"{by_way['swaps']:.2%}", reference, "balance.py"
        for waits in [found["measured"]["wait"]] if "measured" in found else []:
            share, low, high = waits["balanced"]
            reference = f"fixed shares {waits['fixed'][0]:.1%}"
            yield "the same, four real ranks", f"{share:.1%} ({low:.1%}-{high:.1%})", reference, "balance.py"
    for one in records("negatives", lambda settings: not settings["quality"])[-1:]:
        found = one["figures"]
        reference = f"{found['ml1m']['R = 64, k = 4']['over R = 64']:.2f}x with 3,706 items; limit 1.30x"
        shared = found["million"]["R = 64, k = 4"]
        low, high = shared["range"]
        value = f"{shared['over R = 64']:.2f}x ({low:.2f}-{high:.2f})"
        yield "64 negatives shared by 4 events over 64 of their own, a million items", value, reference, "negatives.py"
        memory = f"{found['peak_mib']:.0f} MiB, plain definition {found['plain_peak_mib']:,.0f} MiB"
        yield (
            "peak memory of 128 negatives over the plain definition",
            f"{found['peak_memory_ratio']:.3f}x",
            memory,
            "negatives.py",
        )
    for one in records("beam")[-1:]:
        title = "beam search, 256 beams, 3 levels, 100,000 items, over a loop over beams"
        yield title, figure(one["figures"], "vs_loop"), "limit 10x", "beam.py"
        if "vs_plain" in one["figures"]:
            title = "the same over a plain search with torch: CSR trie, dense mask, memory copied to each beam"
            together = figure(one["figures"], "vs_plain_together")
            yield (
                title,
                figure(one["figures"], "vs_plain"),
                f"{one['settings']['requests']} requests together {together}",
                "beam.py",
            )


def _checkpoints() -> Iterator[Row]:
    for one in records("checkpoint_size")[-1:]:
        found = one["figures"]
        reference = f"with a copy of the rows {found['copy_over_training']:.2f}x; shard {found['shard_mib']:,.0f} MiB; limit 1.10x"
        value = f"{found['peak_over_training']:.3f}x"
        yield "peak memory while a checkpoint is written, over training", value, reference, "checkpoint_size.py"
        title = "table bytes of a delta after 1 % of the rows were touched, over a full checkpoint"
        yield title, f"{found['delta_share']:.1%}", "limit 5 %", "checkpoint_size.py"


def _scale() -> Iterator[Row]:
    titles = {
        "plain": ("clean CSV, file to typed chunks, over polars.read_csv", 4),
        "quoted": ("the same with quotes around every field", 4),
        "csv_over_parquet": ("whole ingest, CSV over Parquet", 1.3),
        "append": ("append of 1 % of the events over an ingest of all", 0.1),
    }
    for key, (title, limit) in titles.items():
        for one in [one for one in records("ingest") if key in one["figures"]][-1:]:
            where = f"{one['settings']['events'] / 1e6:g}M events"
            yield f"{title}, CPU, {where}", figure(one["figures"], key), f"limit {limit:g}x", "ingest.py"
    for one in records("scale")[-1:]:
        found = one["figures"]
        for key in [name.removesuffix("_growth") for name in found if name.endswith("_growth")]:
            costs = found[f"{key}_ns"]
            sizes = list(costs)
            reference = f"{costs[sizes[0]]:,g} ns at {int(sizes[0]):,}, {costs[sizes[-1]]:,g} ns at {int(sizes[-1]):,}; limit 2x"
            title = f"{key.replace('_', ' ')}: cost per unit at the largest size over a tenth of it"
            yield title, figure(found, f"{key}_growth"), reference, "scale.py"


def _train_step(network: str, found: Figures, settings: Figures) -> Iterator[Row]:
    chunks = settings.get("chunks", 1)
    divided = f"{settings['micro_batches']} micro-batches" + f", {chunks} chunks" * (chunks != 1)
    where = f"zipf-{settings['samples']}, {settings['dense']}, {divided}, {network}"
    command = f"train_step.py --dense {settings['dense']} --samples {settings['samples']} --micro-batches {settings['micro_batches']}"
    command += f" --depth {settings['depth']} --ramp {settings['ramp']}" + _chunks(settings)
    overlap = f"busy {found['busy_share']:.0%}, exposed lookup {found['exposed_lookup']:.1%}"
    if "exposed_comm_floor_ms" in found:
        overlap += f", exposed communication {found['exposed_comm_ms']:.1f} ms (lower bound {found['exposed_comm_floor_ms']:.1f})"
    if "step_over_bound" in found:
        overlap += f", step over the longer of link and CPU {found['step_over_bound']:.2f}x"
    equal = "bitwise identical" if found["bitwise_equal"] else "NOT IDENTICAL"
    if "vs_same_micro_batches" in found:
        equal += f", over sequential with the same micro-batches {figure(found, 'vs_same_micro_batches')}"
    yield f"nested over our fastest sequential: {where}", figure(found, "vs_sequential"), f"{equal}; {overlap}", command
    reference = f"nested / dense part alone {figure(found, 'over_dense_only')}"
    yield f"nested over stale by one step: {where}", figure(found, "vs_stale"), reference, command
    if "sequential_vs_torchrec_plain" in found:
        plain = f"our sequential over TorchRec without pipeline {figure(found, 'sequential_vs_torchrec_plain')}"
    else:
        plain = "TorchRec without pipeline was not run"
    yield f"nested over TorchRec SparseDist: {where}", figure(found, "vs_torchrec"), plain, command


def _chunks(settings: Figures) -> str:
    """The flag of these chunks."""
    return f" --chunks {settings['chunks']}" if settings.get("chunks", 1) != 1 else ""


def _is_shared(settings: Figures) -> bool:
    """Whether rows that neighbouring batches do not share travelled apart."""
    return bool(settings.get("chunks", 1) == "shared")


def _weak_scaling(figures: Figures, settings: Figures) -> Row:
    few, many = min(figures, key=int), max(figures, key=int)
    own = {mode: figures[many][mode] for mode in ("nested", "sequential", "stale")}
    low, high = own["nested"]["efficiency_range"]
    title = f"weak scaling {few} to {many} ranks, dense part emulated ({settings['dense_ms']} ms), {settings['rate']} per host"
    others = ", ".join(f"{mode} {own[mode]['efficiency']:.1%}" for mode in ("sequential", "stale"))
    if "nested-groups" in figures[many]:
        grouped = figures[many]["nested-groups"]
        others += f"; nested in {settings['groups']} groups {grouped['efficiency']:.1%}, {grouped['step_ms']:,.0f} ms against {own['nested']['step_ms']:,.0f} ms"
    if (cores := own["nested"].get("cores_share_of_loss")) is not None:
        others += f"; cores' share of the loss {cores:.0%}"
    reference = f"{others}; bitwise identical; cores {own['nested']['cpu_share']:.0%} busy"
    command = f"weak_scaling.py --dense-ms {settings['dense_ms']} --steps {settings['steps']}"
    command += f" --micro-batches {settings['micro_batches']}{_chunks(settings)}"
    return title, f"{own['nested']['efficiency']:.1%} ({low:.1%}-{high:.1%})", reference, command


def table() -> str:
    lines = ["| question | measured | reference, limit | benchmarks/ |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows())])


def pages() -> dict[Path, str]:
    """The pages with their tables between the markers."""
    from headlines import headline_table, readme_table

    page = _between(PAGE.read_text(), "headlines", headline_table())
    return {
        PAGE: _between(page, "scoreboard", table()),
        README: _between(README.read_text(), "figures", readme_table()),
    }


def _between(text: str, name: str, content: str) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{content}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the tables into the README and docs/performance.md")
    options = parser.parse_args()
    if options.write:
        for path, text in pages().items():
            path.write_text(text)
    print(table())


if __name__ == "__main__":
    main()
