"""The native library: compiled once, into a folder that only its user can write."""

import ctypes
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch import tensor

from nestpipe.embedding.id_index import TorchIndex, make_index
from nestpipe.ops import native_library

try:
    COMPILER = native_library.find_compiler()
except native_library.BuildError:
    COMPILER = ""
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C++ compiler")

TINY = 'extern "C" int answer() { return 42; }\n'
LOAD = """
import ctypes, importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("build", sys.argv[1])
build = sys.modules["build"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
sources = build.Sources(Path(sys.argv[2]), sys.argv[3], ("-shared", "-fPIC"))
path, origin = build.build(sources, [Path(sys.argv[4])])
print(ctypes.CDLL(str(path)).answer(), origin.split()[0])
"""


@pytest.fixture
def tiny(tmp_path):
    """A library of one function, and a compiler that keeps a log of what it compiles and takes its time."""
    folder, compiler = tmp_path / "sources", tmp_path / "compiler"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(TINY)
    compiler.write_text(
        f'#!/bin/sh\ncase "$1" in --version) ;; *) echo run >> {tmp_path}/log; sleep 0.3 ;; esac\nexec {COMPILER} "$@"\n'
    )
    compiler.chmod(0o755)
    return native_library.Sources(folder, str(compiler), ("-shared", "-fPIC"))


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has not tried to load the extension yet, with an empty cache."""
    monkeypatch.setattr(native_library, "cache_folders", lambda: [tmp_path / "cache"])
    caches = (native_library._load, native_library._warn_once)
    for function in caches:
        function.cache_clear()
    yield tmp_path
    for function in caches:
        function.cache_clear()


def compiler_script(path, on_compile):
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo fake 1.0 && exit 0\n{on_compile}\n')
    path.chmod(0o755)
    return str(path)


@needs_compiler
def test_the_library_is_compiled_once(tiny, tmp_path):
    path, origin = native_library.build(tiny, [tmp_path / "cache"])
    assert origin.startswith("built in")
    assert ctypes.CDLL(str(path)).answer() == 42
    assert native_library.build(tiny, [tmp_path / "other", tmp_path / "cache"]) == (path, "cached")
    assert (tmp_path / "log").read_text() == "run\n"
    (tiny.folder / "tiny.cpp").write_text(TINY.replace("42", "43"))
    changed, _ = native_library.build(tiny, [tmp_path / "cache"])
    assert changed != path
    assert ctypes.CDLL(str(changed)).answer() == 43


@needs_compiler
def test_processes_that_start_together_compile_it_once(tiny, tmp_path):
    command = [
        sys.executable,
        "-c",
        LOAD,
        native_library.__file__,
        str(tiny.folder),
        tiny.compiler,
        str(tmp_path / "cache"),
    ]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = sorted(process.communicate(timeout=60)[0].strip() for process in processes)
    assert answers == ["42 built", "42 cached", "42 cached", "42 cached"]
    assert (tmp_path / "log").read_text() == "run\n"
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == ["", ".so"]  # the lock and the library


@needs_compiler
def test_a_warning_ends_no_build_but_we_have_none(tmp_path):
    """What a user's compiler warns about, we cannot know: g++ 12 finds fault with its own headers for AVX-512."""
    (tmp_path / "unused.cpp").write_text("static int unused(int number) { return 1; }\n" + TINY)
    native_library.build(native_library.Sources(tmp_path, COMPILER), [tmp_path / "cache"])
    strict = ["-fsyntax-only", "-march=native", "-std=c++17", "-Wall", "-Wextra", "-Werror"]
    for folder, outcome in ((native_library.CSRC, 0), (tmp_path, 1)):
        files = map(str, native_library.Sources(folder, COMPILER).files())
        assert subprocess.run([COMPILER, *strict, *files], check=False, capture_output=True).returncode == outcome


def test_the_digest_depends_on_everything_that_matters(tmp_path, monkeypatch):
    sources = native_library.Sources(tmp_path, compiler_script(tmp_path / "one", "exit 1"))
    (tmp_path / "a.cpp").write_text(TINY)
    digests = [sources.digest()]
    assert sources.digest() == digests[0]
    (tmp_path / "a.h").write_text("// a header\n")
    digests.append(sources.digest())
    (tmp_path / "a.cpp").write_text(TINY + " ")
    digests.append(sources.digest())
    digests.append(replace(sources, flags=("-O2",)).digest())
    other = compiler_script(tmp_path / "two", "exit 1")
    monkeypatch.setattr(native_library, "version_of", lambda compiler: "2.0" if compiler == other else "1.0")
    digests.append(replace(sources, compiler=other).digest())
    monkeypatch.setattr(native_library, "cpu_features", lambda: "another processor")
    digests.append(sources.digest())
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("on_compile", "reason"),
    [
        ("echo 'index.cpp: In function:\nindex.cpp:3: error: no such thing' >&2; exit 1", "error: no such thing"),
        ("exit 1", "no error message"),
        ("exit 0", "wrote no file"),
        ('for last; do :; done; echo nonsense > "$last"', "cannot be loaded"),
        (None, "no C++ compiler (g++ or c++) found"),
    ],
)
def test_without_a_working_compiler_one_line_says_why_and_torch_does_the_work(
    fresh, monkeypatch, caplog, on_compile, reason
):
    if on_compile is None:
        monkeypatch.setattr(native_library.shutil, "which", lambda name: None)
    else:
        script = compiler_script(fresh / "compiler", on_compile)
        monkeypatch.setattr(native_library, "find_compiler", lambda: script)
    index = make_index()
    assert native_library.library() is None
    assert isinstance(index, TorchIndex)
    assert index.find_or_add(tensor([8, 8]))[0].tolist() == [0, 0]
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("nestpipe", "WARNING")
    assert reason in record.getMessage()
    assert "'nestpipe doctor' explains" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert reason in native_library.status()
    with pytest.raises(RuntimeError, match="cannot be built"):
        make_index(native=True)
    assert not list(fresh.glob("cache/*.part"))


@pytest.fixture
def any_file(tmp_path):
    """Sources whose compiler writes an empty library."""
    (tmp_path / "a.cpp").write_text(TINY)
    return native_library.Sources(tmp_path, compiler_script(tmp_path / "cc", 'for last; do :; done; echo > "$last"'))


def test_the_library_is_kept_in_the_users_cache_or_else_in_a_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(native_library.tempfile, "gettempdir", lambda: str(tmp_path))
    temporary = tmp_path / f"nestpipe-{os.geteuid()}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert native_library.cache_folders() == [tmp_path / "cache" / "nestpipe" / "kernels", temporary]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert native_library.cache_folders() == [tmp_path / "home" / ".cache" / "nestpipe" / "kernels", temporary]
    assert not any(folder.is_relative_to(native_library.CSRC.parents[1]) for folder in native_library.cache_folders())


def test_compiling_says_so_once_and_a_fallback_says_why(any_file, tmp_path, capsys):
    (tmp_path / "file").write_text("not a folder")
    folders = [tmp_path / "file" / "kernels", tmp_path / "temporary"]
    path, origin = native_library.build(any_file, folders)
    why = f"{folders[0]} cannot be created (Not a directory)"
    assert path.parent == folders[1]
    assert why in origin
    assert capsys.readouterr().err == f"compiling kernels, once (about 10 s) into {folders[1]}: {why}\n"
    assert native_library.build(any_file, folders) == (path, f"cached: {why}")
    assert capsys.readouterr().err == ""
    native_library.build(any_file, [tmp_path / "own"])
    assert capsys.readouterr().err == "compiling kernels, once (about 10 s)\n"


def test_without_any_usable_folder_the_error_names_each(any_file, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(
        native_library.BuildError, match=r"no folder .*file/a cannot be created.*; b/c is not an absolute"
    ):
        native_library.build(any_file, [tmp_path / "file" / "a", Path("b/c")])
    assert not Path("b").exists()


def test_a_home_that_does_not_exist_is_refused_with_its_name(any_file, tmp_path, monkeypatch):
    def no_home(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    path, origin = native_library.build(any_file, [native_library.cache_folders()[0], tmp_path / "temporary"])
    assert path.parent == tmp_path / "temporary"
    assert "~/.cache/nestpipe/kernels is not an absolute path" in origin


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_can_write_is_neither_read_nor_written(any_file, tmp_path, mode):
    shared = tmp_path / "shared"
    planted, _ = native_library.build(any_file, [shared])
    shared.chmod(mode)
    path, origin = native_library.build(any_file, [shared, tmp_path / "own"])
    assert path == tmp_path / "own" / planted.name
    assert f"{shared} belongs to another user or can be written by others" in origin
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_or_behind_a_link_is_refused(any_file, tmp_path, monkeypatch):
    native_library.build(any_file, [tmp_path / "own"])
    (tmp_path / "link").symlink_to(tmp_path / "own")
    path, _ = native_library.build(any_file, [tmp_path / "link", tmp_path / "third"])
    assert path.parent == tmp_path / "third"
    monkeypatch.setattr(native_library.os, "geteuid", lambda: 12345)
    if (tmp_path / "own").stat().st_uid != 0:
        with pytest.raises(native_library.BuildError, match="belongs to another user"):
            native_library.build(any_file, [tmp_path / "own"])


def test_a_library_that_others_could_write_is_compiled_again(any_file, tmp_path, capsys):
    old_mask = os.umask(0)
    try:
        path, _ = native_library.build(any_file, [tmp_path / "cache"])
    finally:
        os.umask(old_mask)
    assert path.stat().st_mode & 0o777 == 0o755
    path.write_text("planted")
    path.chmod(0o775)
    assert native_library.build(any_file, [tmp_path / "cache"])[1].startswith("built in")
    assert path.read_text() == "\n"


def test_a_build_removes_libraries_that_were_not_loaded_for_30_days(any_file, tmp_path):
    folder = tmp_path / "cache"
    used, _ = native_library.build(any_file, [folder])
    unused, _ = native_library.build(replace(any_file, flags=("-O1",)), [folder])
    day = 86_400
    for path, days in ((used, 40), (unused, 31)):
        os.utime(path, (time.time() - days * day,) * 2)
    native_library.build(any_file, [folder])  # loading counts as use
    newest, _ = native_library.build(replace(any_file, flags=("-O2",)), [folder])
    assert set(folder.glob("*.so")) == {used, newest}
    os.utime(used, (time.time() - 29 * day,) * 2)
    native_library.build(replace(any_file, flags=("-O3",)), [folder])
    assert used.exists()


@needs_compiler
def test_the_real_library_loads_and_says_where_it_is():
    native = native_library.library()
    assert native is not None
    assert str(native.path) in native_library.status()
