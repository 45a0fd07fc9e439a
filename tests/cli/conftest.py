"""What the tests of several commands share."""

import pytest

from nestpipe.cli import main
from tests.small_runs import small_log


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with data and two short runs."""
    folder = tmp_path_factory.mktemp("cli")
    small_log(folder / "log")
    common = ["--data.path", str(folder / "log"), "--train.num-threads", "1", "--data.batch-size", "16"]
    for name, epochs in (("a", "1"), ("b", "3")):
        assert main(["train", "tiny", "--run", str(folder / name), "--train.epochs", epochs, *common]) == 0
    return folder


@pytest.fixture
def run(capsys):
    """Runs `nestpipe ARGUMENTS` in this process: exit code, output, errors."""

    def run(*arguments):
        try:
            code = main(list(map(str, arguments)))
        except SystemExit as stop:
            code = stop.code
        out = capsys.readouterr()
        return code, out.out, out.err

    return run
