"""Flags of `nestpipe align`; no torch in here, as in arguments.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from nestpipe.cli.arguments import OptionalFile, OptionalFolder, OptionalRun, OptionalStep, RunFolder

Mode = Literal["auto", "sequential", "dual-buffer", "frozen-window", "nested"]


@dataclass(frozen=True, kw_only=True)
class AlignArguments:
    """Aligns a trained generative run with rewards, by policy optimisation; the result is a new run.

    For each user the trained model draws a group of items, and rewards say which are better: numbers of the log or of its
    items (a rating, a margin), the values of a trained ranker, closeness to the instruction, diversity. A scenario file has
    the weight of each, by scenario. Items that are better than their group become more probable. With sa-gcpo only items that
    are at least as good as the logged one do; the next-code loss on logged items stays on as an anchor. At the end the start
    and the result are compared on held-out events: reward and NDCG@10, by scenario, with intervals.

    Ctrl-C or a crash loses little: the same command with --resume continues. Under 'nestpipe launch' several ranks share the work.

    Example: nestpipe align runs/shop --scenarios scenarios.json --run runs/shop-aligned

    Next: nestpipe eval runs/shop-aligned --compare runs/shop, or nestpipe serve runs/shop-aligned
    """

    start: RunFolder
    """Folder of a generative run; it stays as it is, and is the frozen reference that items are drawn from."""
    run: OptionalFolder = None
    """Folder of the new run [default: RUN-aligned]."""
    resume: bool = False
    """Resume the run in that folder, if there is one."""
    step: OptionalStep = None
    """Checkpoint of RUN to start from [default: the best one if the run validated, else the latest]."""
    scenarios: OptionalFile = None
    """Scenario file with reward_weights [default: that of RUN]."""
    ranker: OptionalRun = None
    """Run on the same data whose values are the reward 'ranking': a ranking run (its first label) or a next-item run."""
    propensity: str = ""
    """Number column of events with the probability that the logged item was shown: the report then has an off-policy estimate."""
    shown_by: OptionalRun = None
    """The same, if the logged items were drawn by a generative run: its folder."""
    policy: Literal["sa-gcpo", "sapo", "gspo", "grpo"] = "sa-gcpo"
    """Objective: sa-gcpo and sapo have soft gates, gspo and grpo clip the ratio per item and per code."""
    group_size: int = 16
    """Items drawn for each context."""
    passes: int = 8
    """Passes over the users, each at an earlier event of their training history."""
    anchor: float = 0.3
    """Weight of the next-code loss on the logged items; 0: off."""
    no_threshold: bool = False
    """sa-gcpo: let items that are worse than the logged one become more probable too."""
    lr_factor: float = 0.5
    """Learning rates, relative to those that RUN was trained with."""
    batch_size: Annotated[int | None, tyro.conf.arg(metavar="USERS", help_behavior_hint="")] = None
    """Contexts in a batch over all ranks [default: 64, or all if there are fewer]."""
    mode: Annotated[Mode | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Pipeline mode [default: that of RUN]; every mode gives the same weights."""
    save_steps: int = 100
    """Save a checkpoint after this many steps, and at the end."""
    quiet: bool = False
    """Print nothing but errors and the final table."""
