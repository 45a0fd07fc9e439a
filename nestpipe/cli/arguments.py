"""Flags of the commands that have fixed ones: the docstring of a class is the help of its command.

No torch in here: `--help` and refused flags answer without it. Flags of `data` and
`checkpoint` are in data_arguments.py and checkpoint_arguments.py, those of `serve` in
serve/serve_flags.py. `train`, `tune` and `check-model` have the flags of a recipe or a model, and parse for themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from nestpipe.generative.config import Encoder, SidConfig
from nestpipe.simulate import published
from nestpipe.training.config import FitModel

RunFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
IdsFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="IDS")]
DataFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
# Flags without a value of their own by default; their text says what happens then.
OptionalStep = Annotated[int | None, tyro.conf.arg(metavar="STEP", help_behavior_hint="")]
OptionalFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
OptionalFolder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]
OptionalRun = Annotated[Path | None, tyro.conf.arg(metavar="RUN", help_behavior_hint="")]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSid:
    """Builds semantic ids for all items of a sequence folder, from item texts by residual K-means.

    Needs a folder that was ingested with --texts.

    Example: nestpipe sid build data/beauty --out data/beauty-ids --sid.policy keep --sid.balanced

    Next: nestpipe train generative --data.path data/beauty --model.ids data/beauty-ids
    """

    data: DataFolder
    """Sequence folder with item texts, such as 'nestpipe data amazon --texts' writes."""
    out: Path
    """Folder to write."""
    encoder: Encoder = "auto"
    """Text encoder: MiniLM, hashed words, or auto: MiniLM if it is installed."""
    column: str = "title"
    """Column of text.parquet to encode."""
    behaviour: float = 0.0
    """Share of a vector that comes from co-occurrence in training histories, at least 0 (text alone) and below 1."""
    sid: SidConfig = field(default_factory=SidConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendSid:
    """Adds the new items of a sequence folder to semantic ids; old ids and the version stay.

    Example: nestpipe sid extend data/beauty-ids data/beauty-june --out data/beauty-ids-june

    Next: nestpipe sid inspect data/beauty-ids-june --data data/beauty-june
    """

    ids: IdsFolder
    """Folder of semantic ids."""
    data: DataFolder
    """Sequence folder with item texts."""
    out: Path
    """Folder to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectSid:
    """Shows coverage, collisions and balance of semantic ids; with the data they were made from, also purity.

    Example: nestpipe sid inspect data/beauty-ids --data data/beauty
    """

    ids: IdsFolder
    """Folder of semantic ids."""
    data: OptionalFolder = None
    """Sequence folder: how much of its catalogue is covered, and how pure prefixes are."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True, kw_only=True)
class StartArguments:
    """Looks at a log, proposes how to read it and which model to train, prints the exact commands, and runs them.

    Example: nestpipe start log.csv --out shop

    Next: nestpipe recommend shop/run --user NAME
    """

    log: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Files or globs: CSV, Parquet or JSONL, plain, .gz or .zst."""
    out: Path
    """Folder for FOLDER/data, FOLDER/run and FOLDER/run/report.html."""
    user: str = ""
    """Column of user ids; by default proposed from the names."""
    item: str = ""
    """Column of item ids; by default proposed from the names."""
    time: str = ""
    """Column of times, or 'none'; by default proposed from the names."""
    feature: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Further columns of the log, as 'nestpipe data ingest' takes them: name:kind:scope[:option=value]..."""
    label: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """What rankers predict, likewise: name:kind:feature=NUMBER[:option=value]..."""
    items_table: OptionalFile = None
    """File of item attributes, in a column named as the log's item column."""
    users_table: OptionalFile = None
    """File of user attributes, likewise."""
    texts: OptionalFile = None
    """File with item ids as in the log and title, which generative models need."""
    model: FitModel = "sasrec"
    """Model to train."""
    epochs: Annotated[int | None, tyro.conf.arg(metavar="EPOCHS", help_behavior_hint="")] = None
    """Passes over the log; by default from its size, ending early when validation no longer improves."""
    yes: bool = False
    """Run the commands without asking."""


@dataclass(frozen=True, kw_only=True)
class RecommendArguments:
    """Recommends items to users of the log, in the log's own ids. Items that a user has had are left out, unless the
    run was made with --eval.seen none. The time of a request is that of the user's last event.

    --all --out recommendations.parquet writes them for every user of the log. Under 'nestpipe launch' the ranks share the users.

    Example: nestpipe recommend runs/shop --user alice bob
    """

    run: RunFolder
    """Folder of the run."""
    user: tuple[str, ...] = ()
    """Own ids of users, as they are in the log. One without history gets the most popular items."""
    all: bool = False
    """Every user of the log; needs --out."""
    k: int = 10
    """Items for each user."""
    scenario: str = ""
    """Scenario of a generative run, by name."""
    trigger: str = ""
    """Trigger item that steers a generative run, by its own id."""
    instruction: str = ""
    """Text that steers a generative run that was trained on instructions, such as "a gift for a child"."""
    filter: tuple[str, ...] = ()
    """Show only items with these attributes: FIELD=VALUE, FIELD=VALUE,VALUE or FIELD=LOW..HIGH, all of them."""
    rules: OptionalFile = None
    """JSON file of named sets of rules; see docs/how-to/rules.md."""
    rule_set: str = ""
    """The set of --rules to use; a file with one set needs no name."""
    out: OptionalFile = None
    """Write a Parquet file with the columns user, rank, item, score, path instead of printing."""
    step: OptionalStep = None
    """Checkpoint to use; by default the best one if the run validated, else the latest."""
    json: bool = False
    """Print one JSON object per user instead of tables."""


@dataclass(frozen=True, kw_only=True)
class SimilarArguments:
    """Shows the items whose vectors point most in the direction of an item's (cosine), in the log's own ids.

    Example: nestpipe similar runs/shop --item p7
    """

    run: RunFolder
    """Folder of the run."""
    item: tuple[str, ...]
    """Own ids of items, as they are in the log."""
    k: int = 10
    """Similar items for each of them."""
    filter: tuple[str, ...] = ()
    """Show only items with these attributes: FIELD=VALUE, FIELD=VALUE,VALUE or FIELD=LOW..HIGH, all of them."""
    rules: OptionalFile = None
    """JSON file of named sets of rules; see docs/how-to/rules.md."""
    rule_set: str = ""
    """The set of --rules to use; a file with one set needs no name."""
    step: OptionalStep = None
    """Checkpoint to use; by default the best one if the run validated, else the latest."""
    json: bool = False
    """Print one JSON object per item instead of tables."""


@dataclass(frozen=True, kw_only=True)
class ForgetArguments:
    """Erases a user from the sequence folder of runs, from what their services have stored (events, KV prefixes) and from their
    instructions.

    Instances that serve the runs notice within a second and drop all KV prefixes. Name every run on that folder: a run that
    is left out refuses the folder afterwards. Weights stay as they were trained.

    Example: nestpipe forget runs/ranking --user 42

    Next: nestpipe eval runs/ranking, because reports that list users are deleted.
    """

    runs: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="(required)")
    ]
    """Folders of all runs on one sequence folder."""
    user: str
    """Own id of the user, as it is in the log"""
    state: str = ""
    """Address of the database that 'nestpipe serve --state' was given, if any."""


@dataclass(frozen=True, kw_only=True)
class EvalArguments:
    """Ranks the held-out events of a run, next to baselines, or compares two runs with paired confidence intervals.

    A retrieval run is ranked against the whole catalogue; a ranking run is scored by AUC and GAUC. The report is kept in
    RUN/eval. Under 'nestpipe launch' the ranks share users and catalogue, with the same report. A run that was trained on
    instructions also answers every request without one and, as a control, with that of another request.

    Example: nestpipe eval runs/a --compare runs/b

    Next: nestpipe report runs/a
    """

    run: RunFolder
    """Folder of the run."""
    compare: OptionalRun = None
    """Another run on the same data: each metric with the paired 95 % interval of its difference."""
    seeds: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="")] = ()
    """Runs that differ from RUN in the seed only: one result, mean and deviation over all of them."""
    baselines: Annotated[
        tuple[Literal["popularity", "last_item", "transitions", "item_knn", "content_knn", "sasrec"], ...],
        tyro.conf.arg(metavar="NAME [NAME ...]"),
    ] = ("popularity", "last_item", "transitions", "item_knn", "content_knn")
    """Baselines of a retrieval run, fitted on its training events in seconds: content_knn only where the log has item features;
    sasrec is trained for minutes, once."""
    step: OptionalStep = None
    """Checkpoint of RUN to evaluate [default: the best one if the run validated, else the latest]."""
    target: Literal["test", "validation"] = "test"
    """Which held-out events to rank."""
    max_users: Annotated[int | None, tyro.conf.arg(metavar="USERS", help_behavior_hint="")] = None
    """Evaluate a fixed random sample of so many users, the same for every run; 0 means all [default: as the run]."""
    ks: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="K [K ...]", help_behavior_hint="")] = None
    """List lengths of HR, NDCG and coverage, in increasing order [default: as the run]."""
    seen: Annotated[Literal["all", "input", "none"] | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Items removed from the ranking: all, input or none [default: as the run]."""
    batch_size: Annotated[int | None, tyro.conf.arg(metavar="USERS", help_behavior_hint="")] = None
    """Users encoded at once [default: as the run]."""
    instructions: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="STORE [STORE ...]", help_behavior_hint="")] = ()
    """Further stores of 'think --for-training', tried on the same requests: say, those of a language model beside a template."""
    audit: bool = False
    """Instead: poison the held-out events and look for what the run reads of them; exit code 1 if it finds a leak."""
    json: bool = False
    """Print JSON instead of tables."""


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Writes one self-contained HTML file about a run: curves, quality, overlap, load balance, settings.

    Shows what the run has: evaluate it first, and train with --pipeline.advanced.trace-steps, to see quality and overlap.

    Example: nestpipe report runs/tiny
    """

    run: RunFolder
    """Folder of the run, finished or not."""
    out: OptionalFile = None
    """File to write [default: RUN/report.html]."""


@dataclass(frozen=True, kw_only=True)
class SwapArguments:
    """Loads another model into running instances, without downtime.

    An instance tests the model before it serves new requests with it; requests in flight keep the old one. With --share it
    serves both and compares them (docs/how-to/serve.md).

    Example: nestpipe swap runs/ranking runs/better
    """

    run: RunFolder
    """Folder of the run that 'nestpipe serve' was started with; its token is there."""
    new: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NEW]", help_behavior_hint="")] = None
    """Folder of the run to serve from now on; on the same sequence folder, or on one that has grown from it."""
    step: OptionalStep = None
    """Checkpoint of NEW [default: the best one if the run validated, else the latest]."""
    share: Annotated[float | None, tyro.conf.arg(metavar="SHARE", help_behavior_hint="")] = None
    """Compare: only this share of the users (0 .. 1, by a hash) gets the new model; 0 ends the comparison."""
    host: str = "127.0.0.1"
    """The --admin-host of 'nestpipe serve'."""
    admin_port: int = 8751
    """The --admin-port of 'nestpipe serve'."""
    instances: int = 0
    """The --instances of 'nestpipe serve': they are swapped one after the other."""
    prefill: bool = False
    """Store KV prefixes of the new model for the users who have stored ones, before it is used; see docs/how-to/prefix-store.md."""
    rate: float = 500.0
    """Compute for that, in milliseconds per second."""
    timeout_s: float = 600.0
    """How long one instance may take to load, test and measure the model; with --prefill there is no limit."""


@dataclass(frozen=True, kw_only=True)
class TraceArguments:
    """Shows where the time of training steps went: busy, or waiting for lookup or communication, per rank.

    Needs a run that was trained with --pipeline.advanced.trace-steps N. Also writes RUN/trace/timeline.svg and
    RUN/trace/trace.perfetto.json, for ui.perfetto.dev.

    Example: nestpipe trace runs/tiny --steps 10:14

    Next: nestpipe tune pipeline tiny, or nestpipe simulate --from runs/tiny
    """

    run: RunFolder
    """Folder of a run that recorded its steps with --pipeline.advanced.trace-steps N."""
    steps: Annotated[str | None, tyro.conf.arg(metavar="A:B", help_behavior_hint="")] = None
    """Batches A:B, from A up to and without B; A or B may be left out [default: all, and three are drawn]."""
    rank: Annotated[int | None, tyro.conf.arg(metavar="RANK", help_behavior_hint="")] = None
    """Show and draw this rank alone [default: all]."""
    sequential: OptionalRun = None
    """A traced sequential run of the same work, in which nothing is hidden: exposure is measured against its times."""
    json: bool = False
    """Print JSON instead of tables."""


@dataclass(frozen=True, kw_only=True)
class SimulateArguments:
    """Predicts what a training step takes on many workers, by running the real schedules in a cost model, and draws it.

    Nothing is measured: the model's constants come from a traced run (--from), a file (--constants), or the published table.

    Example: nestpipe simulate --workers 1536
    """

    workers: int = published.WORKERS
    """How many workers train; each has the work of one recorded rank."""
    run: Annotated[Path | None, tyro.conf.arg(name="from", metavar="RUN", help_behavior_hint="")] = None
    """Folder of a run that recorded its steps on two or more ranks with --pipeline.advanced.trace-steps N: its constants."""
    constants: OptionalFile = None
    """File of constants that --save wrote [default: those of the published TorchRec row]."""
    micro_batches: int = published.MICRO_BATCHES
    """Micro-batches of a batch, in cases that have them."""
    group_size: int = published.GROUP_SIZES[1]
    """Workers that hold the table once, in cases with replica groups."""
    duplicates: Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Uses of a row in a batch, which TorchRec-like cases all send; a trace does not record it [default: 1]."""
    save: OptionalFile = None
    """File for the constants."""
    out: Path = Path("simulate.svg")
    """File for the drawing of 8 to 4,096 workers."""
    published: bool = False
    """Print the published table next to the model fitted to its TorchRec row alone, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class DoctorArguments:
    """Checks what this machine can run: versions, compiler, kernels, memory, speed, determinism.

    Compiles the native library if it is not cached. Exit code 1 if nestpipe cannot work here. With --device: checks training on
    a device instead, by small trainings there and by a run that is killed; takes some minutes.

    Example: nestpipe doctor --device auto --write device.json

    Next: nestpipe demo
    """

    json: bool = False
    """Print JSON instead of a table."""
    device: Annotated[str, tyro.conf.arg(metavar="auto|cpu|cuda|npu", help_behavior_hint="")] = ""
    """Check this device; auto is the accelerator if there is one."""
    only: Annotated[str, tyro.conf.arg(metavar="TEXT,...", help_behavior_hint="")] = ""
    """With --device: only the checks whose name contains one of these texts."""
    write: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """With --device: record date, hardware and results as JSON. With it, docs/how-to/devices.md can name your device."""


@dataclass(frozen=True, kw_only=True)
class DemoArguments:
    """Runs everything once on generated data and checks each step: ingest, train, resume, evaluate, serve, generate.

    Takes some minutes on two cores. Ctrl-C ends every process that it started.

    Example: nestpipe demo --out demo-out

    Next: nestpipe train tiny --help; docs/get-started/own-data.md for a log of yours.
    """

    out: Path = Path("demo-out")
    """Folder for everything the demo writes; an earlier demo's folder is replaced."""
    quick: bool = False
    """Train for a moment only: checks the commands, not the quality."""
