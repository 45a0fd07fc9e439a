"""`nestpipe think`: mistakes; tests/serve/test_generation.py runs the job."""


def test_mistakes_are_one_message(run, folder, tmp_path):
    for arguments, message in [
        ([folder / "log"], "is a sequence folder; name --store FILE and --ids FOLDER with it"),
        ([folder / "a"], "is not a generative run"),
        ([tmp_path / "none"], "there is no sequence folder"),
        ([folder / "a", "--think.ttl-s", "0"], "think.ttl_s is 0.0"),
    ]:
        code, _, errors = run("think", *arguments)
        assert code == 2
        assert message in errors
