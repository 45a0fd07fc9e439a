"""`nestpipe report`: where the file goes; tests/report has what is in it."""


def test_the_file_goes_where_it_is_wanted(run, folder, tmp_path):
    code, shown, _ = run("report", folder / "a", "--out", tmp_path / "new" / "report.html")
    assert code == 0
    assert shown.strip() == str(tmp_path / "new" / "report.html")
    assert "<script" not in (tmp_path / "new" / "report.html").read_text()


def test_a_folder_in_its_place_is_refused(run, folder, tmp_path):
    code, _, errors = run("report", folder / "a", "--out", tmp_path)
    assert code == 2
    assert "a folder; name a file" in errors
