"""The `train` section of a run's configuration."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

FitModel = Literal[
    "sasrec", "hstu", "fuxi"
]  # the recipes for any log that `nestpipe.fit` and `nestpipe start` choose sizes for


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long to train and what to keep. Training ends at the first limit that is reached; 0 disables a limit."""

    epochs: int = 10
    """Passes over the training samples."""
    steps: int = 0
    """Number of batches."""
    minutes: float = 0.0
    """Training time, added up over interruptions."""
    clip_norm: float = 0.0
    """Scale gradients down to this norm; 0 disables clipping."""
    clip: Literal["dense", "all"] = "dense"
    """Which gradients are clipped: those of the dense part, or of dense part and rows together."""
    skip_nonfinite: bool = False
    """Skip a batch in which any rank sees a non-finite value, instead of stopping."""
    warmup_steps: int = 0
    """Learning rates rise linearly over this many steps."""
    decay_steps: int = 0
    """Learning rates fall linearly to 1 % at this step; 0 disables the decay."""
    decay_epochs: int = 0
    """The same, in epochs; an epoch counts as many steps as the first one."""
    eval_epochs: int = 1
    """Validate after this many epochs (only with data.validation)."""
    patience: int = 0
    """Stop after this many validations without a better metric; the best checkpoint is kept."""
    metric: str = "ndcg@10"
    """The validation metric for patience and for the best checkpoint."""
    save_steps: int = 500
    """Save a checkpoint after this many steps, and at the end."""
    keep_last: int = 2
    """Checkpoints to keep, the best one apart."""
    async_save: bool = True
    """Write checkpoints in the background while training continues (not with rows in files)."""
    max_deltas: int = 8
    """Checkpoints in a row that hold only what has changed, while they are small; 0 saves every checkpoint whole."""
    checkpoints: str = ""
    """Where checkpoints are saved: by default the run folder, which all ranks then share, or a URL such as s3://bucket/run,
    to which every rank writes its own files (needs the extra nestpipe[remote])."""
    log_steps: int = 20
    """Write metrics after this many steps."""
    num_threads: int = 0
    """Threads inside an operation; 0 takes the cores of the process, under 'nestpipe launch' a rank's share.
    Results are bitwise repeatable for a fixed number."""
    device: str = "auto"
    """Where to train: auto (the accelerator if there is one, else the CPU), cpu, cuda, npu, or another that torch has."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Matrix products of the dense part; bf16 is mixed precision: weights, rows, sums and optimizers stay fp32."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs the extra nestpipe[tensorboard])."""

    def problems(self) -> Iterator[str]:
        if not (self.epochs > 0 or self.steps > 0 or self.minutes > 0):
            yield "epochs, steps and minutes are all 0: nothing would end the run"
        for name in (
            "epochs",
            "steps",
            "minutes",
            "warmup_steps",
            "decay_steps",
            "decay_epochs",
            "patience",
            "num_threads",
            "max_deltas",
            "clip_norm",
        ):
            if getattr(self, name) < 0:
                yield f"{name} is {getattr(self, name)}; it must not be negative"
        if not re.fullmatch(r"auto|[a-z][a-z0-9_]*(:\d+)?", self.device):
            yield f"device is {self.device!r}; it must be auto, cpu, cuda, npu, or another device that torch has"
        if self.decay_steps and self.decay_epochs:
            yield f"decay_steps is {self.decay_steps} and decay_epochs is {self.decay_epochs}; give one of them"
        for name in ("eval_epochs", "save_steps", "keep_last", "log_steps"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}; it must be at least 1"
        if self.tensorboard and importlib.util.find_spec("tensorboard") is None:
            yield "tensorboard is on, but the package is not installed: pip install 'nestpipe[tensorboard]'"
        if self.checkpoints and "://" not in self.checkpoints:
            yield f"checkpoints is {self.checkpoints!r}; it must be a URL, such as s3://bucket/run or file:///folder"
        if not re.fullmatch(r"(hr|ndcg)@[1-9]\d*|mrr|g?auc/\w+", self.metric):
            yield f"metric is {self.metric!r}; it must be hr@K, ndcg@K, mrr, or auc/LABEL or gauc/LABEL for ranking"
