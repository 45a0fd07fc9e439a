"""Kills a process at every system call that changes a prefix store, and opens what it has left.

    python -m tests.serve.store_kills FOLDER

A child process writes, appends, replaces, evicts, forgets and removes models; it dies by SIGKILL at its n-th such call, for every
n until it lives. A call that writes is done halfway before. The parent then opens the store and uses it.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

from nestpipe.serve.prefix_store import PrefixStore
from tests.serve.stored_examples import SIZE, made, read, same, write

CAP = 4 * SIZE
CALLS = ("open", "pwritev", "ftruncate", "truncate", "replace", "rename", "unlink", "mkdir", "rmdir", "utime")
SAVED = [made(user=1), made(user=2, length=30)]  # before the child begins


class Fuse:
    """Ends the process at the n-th call."""

    def __init__(self, n: int):
        self.left = n

    def arm(self) -> None:
        for name in CALLS:
            setattr(os, name, self.wrapped(name, getattr(os, name)))

    def wrapped(self, name, call):
        def called(*arguments, **options):
            self.left -= 1
            if self.left == 0:
                if name == "pwritev":
                    file, buffers, place = arguments
                    whole = b"".join(buffers)
                    os.pwrite(file, whole[: len(whole) // 2], place)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return called


def states(folder: Path) -> None:
    """Every kind of change, one after the other."""
    store = PrefixStore(folder, cap=CAP)
    write(store, made(user=3))  # a new file
    write(store, made(user=2, length=70), follows=made(user=2, length=30).key)  # a segment more
    write(store, made(user=1, salt=4))  # another history
    read(store, made(user=3))
    write(store, made(user=4))
    write(store, made(user=5))  # evicts
    write(store, made(user=6, weights="new"))
    store.forget(5)
    store.retain_models([made(weights="new").key.made_by])
    store.retain(lambda user, length: False)
    store.close()
    PrefixStore(folder, cap=CAP).close()


def check(folder: Path, n: int) -> None:
    """What is there is right, drafts are gone, bytes are counted, and the store works."""
    store = PrefixStore(folder, cap=CAP)
    store.check()
    assert not store.counts["corrupt"], f"call {n}: a kill is no damage"
    known = [*SAVED, made(user=3), made(user=2, length=70), made(user=1, salt=4), made(user=4), made(user=5)]
    known.append(made(user=6, weights="new"))
    keys = {one.key: one for one in known}
    for name, entry in list(store._entries.items()):
        assert same(read(store, keys[entry.key]), keys[entry.key]), f"call {n}: {name}"
    assert not list(folder.rglob("*.tmp"))
    last = made(user=9, length=40)
    assert write(store, last)
    assert same(read(store, last), last)
    store.check()
    store.close()


def main(folder: Path) -> int:
    for n in range(1, 200):
        shutil.rmtree(folder, ignore_errors=True)
        store = PrefixStore(folder, cap=CAP)
        assert all(write(store, one) for one in SAVED)
        store.close()
        child = os.fork()
        if child == 0:
            Fuse(n).arm()
            states(folder)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"call {n}: status {status}"
        check(folder, n)
        if not os.WIFSIGNALED(status):
            print(n - 1)
            return 0
    raise AssertionError("the child never lived")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
