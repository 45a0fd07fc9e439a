"""The tables of docs/how-to/devices.md: what proves each component of training on a device, and on which hardware it ran.

    python docs/_generate/devices.py --write      # after a change of the table below, or with a new record
    python docs/_generate/devices.py --check      # exit code 1 if the page is stale

Every entry names the test that proves it; a test checks that they exist. The last column comes from the records that `nestpipe
doctor --device cuda --write benchmarks/results/devices/NAME.json` makes: nothing there is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestpipe.ops.backends import TABLE

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "devices.md"
RECORDS = ROOT / "benchmarks" / "results" / "devices"
_NOT_HARDWARE = {"cpu", "fake"}


@dataclass(frozen=True, slots=True)
class Proof:
    """A component, the tests that prove it in each way, and why a way is missing if none does."""

    about: str
    fake: tuple[str, ...] = ()  # on the fake accelerator
    interpreter: tuple[str, ...] = ()  # the kernel in Triton's interpreter, against the CPU
    compiled: tuple[str, ...] = ()  # ahead of time, for GPUs that are not here
    missing: str = ""


_FAKE, _OPS = "tests/fake_accelerator/", "tests/ops/"
_MODELS, _RUNS, _MUTANTS = f"{_FAKE}test_models.py::", f"{_FAKE}test_runs.py::", f"{_FAKE}test_device_mutants.py::"
_EVERY_MODEL = f"{_MODELS}test_nested_is_bitwise_sequential_and_close_to_the_cpu"
_EVERY_SCHEDULE = f"{_FAKE}test_schedules.py::test_every_schedule_is_bitwise_the_sequential_step_on_the_cpu"
_ATTENTION_RUNS = (f"{_OPS}test_attention_triton.py::test_kernels_equal_the_reference_in_the_interpreter",)
_ATTENTION_COMPILES = (
    f"{_OPS}test_attention_compiled.py::test_a_representative_of_each_kernel_is_within_its_budget",
    f"{_OPS}test_attention_compiled.py::test_all_kernels_modes_and_widths_are_within_their_budgets",
)
_INTERPRETED = "tests/embedding/test_triton_rows.py::test_kernels_have_the_bits_of_native_code_in_the_interpreter"
COMPONENTS: dict[str, Proof] = {
    "streams": Proof(
        "waits, joins and lifetimes: each that is left out is seen",
        fake=(
            f"{_MUTANTS}test_a_missing_wait_or_join_is_seen",
            f"{_MUTANTS}test_a_missing_edge_of_nested_is_seen",
            f"{_MUTANTS}test_a_missing_edge_of_any_schedule_is_seen",
            f"{_MUTANTS}test_memory_that_is_freed_in_use_is_seen",
        ),
    ),
    "schedules": Proof("all of them, bitwise the sequential step", fake=(_EVERY_SCHEDULE,)),
    "models and losses": Proof("retrieval, ranking, DCN; all losses", fake=(_EVERY_MODEL,)),
    "semantic-id models": Proof(
        "generative training and alignment",
        fake=(
            f"{_RUNS}test_models_with_semantic_ids_train_and_validate",
            f"{_RUNS}test_a_run_is_aligned_on_devices",
        ),
    ),
    "attention silu": Proof(
        "HSTU and FuXi",
        fake=(_EVERY_MODEL,),
        interpreter=_ATTENTION_RUNS,
        compiled=_ATTENTION_COMPILES,
    ),
    "attention softmax": Proof(
        "SASRec", fake=(_EVERY_MODEL,), interpreter=_ATTENTION_RUNS, compiled=_ATTENTION_COMPILES
    ),
    "row kernels": Proof(
        "gather, scatter, sums, optimizers: the bits of C++",
        fake=(_EVERY_SCHEDULE,),
        interpreter=(_INTERPRETED,),
        compiled=(f"{_OPS}test_rows_compiled.py::test_kernels_are_within_their_budgets",),
    ),
    "negatives": Proof(
        "sampled softmax, also of rows in host memory",
        fake=(
            _EVERY_MODEL,
            f"{_FAKE}test_negatives_offload.py::test_rows_on_the_host_give_the_loss_of_the_definition",
            f"{_FAKE}test_negatives_offload.py::test_a_missing_wait_is_seen",
        ),
        interpreter=(_INTERPRETED,),
        compiled=(f"{_OPS}test_negatives_compiled.py::test_kernels_are_within_their_budgets",),
    ),
    "mixed precision": Proof(
        "`--train.precision bf16`",
        fake=(f"{_MODELS}test_mixed_precision_is_bitwise_sequential_and_close_to_that_of_the_cpu",),
    ),
    "device row buffer": Proof(
        "rows on the device over all rows on the host",
        fake=(
            f"{_MODELS}test_a_device_smaller_than_the_table",
            f"{_MODELS}test_a_window_that_does_not_fit_is_refused_with_the_numbers",
        ),
    ),
    "host waits": Proof("at most 2 per step", fake=(f"{_MODELS}test_the_host_waits_at_most_twice_per_step",)),
    "collectives": Proof(
        "rows, gradients and dense sums of several ranks",
        fake=(f"{_RUNS}test_a_nested_run_that_is_resumed_ends_as_a_sequential_one", _EVERY_SCHEDULE),
    ),
    "kill and resume": Proof(
        "kill -9, also from the CPU to a device",
        fake=(
            f"{_RUNS}test_a_run_killed_by_the_system_resumes_bitwise",
            f"{_RUNS}test_a_run_of_the_cpu_is_resumed_on_a_device",
        ),
    ),
    "validation": Proof(
        "weights and rows of the device, scored on the host",
        fake=(f"{_RUNS}test_validation_reads_the_rows_and_weights_of_the_device",),
    ),
    "serving rankers": Proof(
        "`nestpipe serve --device`: model, KV prefixes, hits",
        fake=(
            f"{_FAKE}test_serving.py::test_every_path_gives_the_scores_of_the_cpu",
            f"{_FAKE}test_serving.py::test_the_device_tier_is_bounded",
            f"{_FAKE}test_serving.py::test_moves_that_nobody_waits_for_are_seen",
        ),
    ),
    "evaluation and other serving": Proof(
        "`nestpipe eval`; next-item, DCN, generative runs", missing="on the CPU only"
    ),
}


def tests() -> Iterator[str]:
    """Every test that the table names."""
    for proof in COMPONENTS.values():
        yield from (*proof.fake, *proof.interpreter, *proof.compiled)


def records(folder: Path = RECORDS) -> list[dict[str, Any]]:
    """The complete records of real devices, oldest first."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    real = [one for one in found if one["device"]["type"] not in _NOT_HARDWARE and one["complete"]]
    return sorted(real, key=lambda one: one["date"])


def ran_on(component: str, known: list[dict[str, Any]]) -> str:
    """Where a component ran, with the number of checks that passed; the latest record of each device."""
    latest = {one["device"]["name"]: one for one in known}
    cells = []
    for name, one in latest.items():
        own = [check["result"] for check in one["checks"] if check["component"] == component]
        ran = [result for result in own if result != "absent"]
        if ran:
            cells.append(f"{name}: {ran.count('pass')} of {len(ran)} ({one['date'].partition(' ')[0]})")
    return "; ".join(cells) or "none yet"


def proof_table(known: list[dict[str, Any]]) -> str:
    lines = [
        "| component | fake accelerator | interpreter | compiled | run on hardware |",
        "|---|---|---|---|---|",
    ]
    for name, proof in COMPONENTS.items():
        ways = (_cell(proof.fake), _cell(proof.interpreter), _cell(proof.compiled))
        where = proof.missing or ran_on(name, known)
        lines.append(f"| **{name}**: {proof.about} | {' | '.join(ways)} | {where} |")
    return "\n".join(lines)


def _cell(tests_of_way: tuple[str, ...]) -> str:
    files = dict.fromkeys(Path(one.partition("::")[0]).name for one in tests_of_way)
    return ", ".join(f"`{name}`" for name in files) or "-"


def backend_table() -> str:
    """Which attention backends there are, from the dispatch table."""
    lines = ["| attention backend | CPU | CUDA | NPU |", "|---|---|---|---|"]
    for name, one in TABLE.items():
        lines.append(f"| {name}: {one.about} | {one.cpu} | {one.cuda} | {one.npu} |")
    return "\n".join(lines)


def page(text: str, folder: Path = RECORDS) -> str:
    """A page with both tables between their markers."""
    for name, content in (("proofs", proof_table(records(folder))), ("backends", backend_table())):
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not (found and ended):
            raise ValueError(f"{PAGE} has no '{begin}' ... '{end}'")
        text = f"{before}{begin}\n{content}\n{end}{after}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the tables into the page")
    parser.add_argument("--check", action="store_true", help="exit code 1 if the page is stale")
    options = parser.parse_args()
    text = page(PAGE.read_text())
    if options.check and text != PAGE.read_text():
        print(f"{PAGE.relative_to(ROOT)} is stale; run 'python docs/_generate/devices.py --write'", file=sys.stderr)
        return 1
    if options.write:
        PAGE.write_text(text)
    elif not options.check:
        print(proof_table(records()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
