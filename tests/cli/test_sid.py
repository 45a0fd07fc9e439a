"""`nestpipe sid`: mistakes; tests/generative/test_semantic_ids.py builds, extends and inspects."""

from tests.small_runs import small_log


def test_mistakes_are_one_message(run, tmp_path):
    small_log(tmp_path / "log")
    out = ["--out", tmp_path / "ids"]
    for arguments, message in [
        (
            ["build", tmp_path / "log", "--behaviour", "1", *out],
            "--behaviour is 1.0; it must be at least 0 and below 1",
        ),
        (["build", tmp_path / "log", *out], "has no text.parquet; ingest the log again with --texts FILE"),
        (["build", tmp_path / "none", *out], "there is no sequence folder"),
        (["inspect", tmp_path / "none"], "none"),
    ]:
        code, _, errors = run("sid", *arguments)
        assert code == 2
        assert message in errors
        assert not (tmp_path / "ids").exists()
