"""Every command in README.md and docs/ is run, and the generated pages are complete.

Blocks of one page run in order and in one working folder, as a reader would type them. A block whose first line is
`# needs: something` cannot run here; it is listed instead.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.warm_program import warm_program

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_ELSEWHERE = {ROOT / "docs" / "get-started" / "every-model.md"}  # by cli/test_every_model.py
LANGUAGES = {"bash", "sh", "shell", "console", "python"}
TIMEOUT_S = 240
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1``` *$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block and the line where it starts."""

    language: str
    text: str
    line: int

    @property
    def needs(self) -> str | None:
        """What the block needs that a test has not, or None if it can run."""
        first = self.text.lstrip().partition("\n")[0]
        return first.removeprefix("# needs:").strip() if first.startswith("# needs:") else None

    def commands(self) -> str:
        """The text to run: in a console block the lines behind a prompt, the others are output."""
        if self.language != "console":
            return self.text
        return "\n".join(line[2:] for line in self.text.splitlines() if line.startswith("$ ")) + "\n"


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page that hold commands."""
    found = []
    for match in _FENCE.finditer(page):
        indent, language, text = match.groups()
        if language in LANGUAGES:
            text = "\n".join(line.removeprefix(indent) for line in text.splitlines()) + "\n"
            found.append(Block(language, text, page[: match.start()].count("\n") + 1))
    return found


def run(block: Block, folder: Path, *programs: Path) -> subprocess.CompletedProcess[str]:
    """Runs a block in a folder with these folders and the environment's programs first on the path."""
    python = block.language == "python"
    interpreter = [str(programs[0] / "warm-python")] if programs else [sys.executable, "-"]
    command = interpreter if python else ["bash", "-euo", "pipefail", "-s"]
    path = os.pathsep.join([*map(str, programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        command,
        input=block.commands(),
        cwd=folder,
        env={**os.environ, "PATH": path},
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
        check=False,
    )


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_there_is_a_readme() -> None:
    assert (ROOT / "README.md").is_file(), "README.md is missing"


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`nestpipe` without the seconds that Python and torch take to start."""
    with warm_program(tmp_path_factory.mktemp("warm")) as folder:
        yield folder


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in PAGES if page.exists() and page not in RUN_ELSEWHERE], ids=name_of)
def test_commands_of_page(
    page: Path, tmp_path: Path, warm: Path, record_property: Callable[[str, object], None]
) -> None:
    if (ROOT / "examples").is_dir():
        (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block in blocks_of(page.read_text()):
        where = f"{name_of(page)}:{block.line}"
        if block.needs is not None:
            record_property("not run", f"{where}: needs {block.needs}")
            continue
        done = run(block, tmp_path, warm)
        message = (
            f"{where} ended with code {done.returncode}\n{block.text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
        assert done.returncode == 0, message


@pytest.mark.parametrize("page", [page for page in PAGES if page.exists()], ids=name_of)
def test_blocks_that_call_make_need_a_clone(page: Path) -> None:
    for block in blocks_of(page.read_text()):
        if re.search(r"^make\b", block.commands(), re.MULTILINE):
            where = f"{name_of(page)}:{block.line}"
            assert block.needs is not None, f"{where} calls make; its first line must be '# needs: a clone'"


def test_the_reference_is_complete() -> None:
    """What the site generates from the code: one section for each command, setting, call, public name and format."""
    import nestpipe
    from nestpipe.cli import COMMANDS
    from nestpipe.config import Config, keys

    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "_generate" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    pages = {Path(name).stem: page() for name, page in reference.PAGES.items()}
    assert [name for name in COMMANDS if f"# nestpipe {name}\n" not in pages["cli"]] == []
    assert "usage: nestpipe data ingest" in pages["cli"]
    own = [key for key in keys(Config()) if not key.startswith("model.")]
    assert [key for key in own if f"| `{key}` |" not in pages["configuration"]] == []
    assert {"### POST /v1/rank", "### POST /v1/generate", "### POST /v1/recommend"} <= {*pages["http"].splitlines()}
    assert [name for name in nestpipe.__all__ if f".{name}\n" not in pages["python"]] == []
    assert pages["file-formats"].count("\nVersion ") >= 4


PAGE = """
Text with `code`.

```bash
# needs: a clone
make test
```

1. In a list:

   ```bash
   echo one > made
   ```

```text
not a command
```

```console
$ cat made
one
$ test -f made
```

```python
print(open("made").read())
```

```bash
false | true
```

```sh
test -f made
```

```shell
false
```

```
output
```
"""


def test_blocks_are_found_and_run_in_one_folder(tmp_path: Path) -> None:
    blocks = blocks_of(PAGE)
    assert [block.language for block in blocks] == ["bash", "bash", "console", "python", "bash", "sh", "shell"]
    assert [block.needs for block in blocks] == ["a clone", *[None] * 6]
    assert blocks[1].text == "echo one > made\n"
    assert PAGE.splitlines()[blocks[3].line - 1] == "```python"
    results = [run(block, tmp_path) for block in blocks[1:]]
    assert [done.returncode for done in results] == [0, 0, 0, 1, 0, 1]
    assert results[1].stdout == "one\n"
