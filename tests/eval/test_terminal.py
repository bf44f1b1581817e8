"""The table that the main job prints."""

from invented_run import invented_run, read

from eval.terminal import summary


def test_aligned_and_under_100_columns(run):
    text = summary(read(run), run / "report" / "report.html")
    lines = text.splitlines()
    assert all(len(line) < 100 for line in lines if not line.startswith("report: "))
    assert "\u00a0" not in text and lines[-1] == f"report: {run}/report/report.html"
    head, rows = lines[1], {line.split()[0]: line for line in lines[2:7]}
    assert list(rows) == ["Base", "FP_ft", "RTN", "GPTQ", "QAT"]
    entry = read(run)["schemes"]["w4a16_g32"]
    for column, name in (("base", "Base"), ("qat", "QAT")):
        end = head.index("loss") + len("loss")
        assert rows[name][:end].endswith(f"{entry['loss'][column]:.4f}")
    assert rows["QAT"].endswith("4.50") and rows["Base"].endswith("16.00")
    assert len({len(row) for row in rows.values()}) == 1
    assert "gap recovered by QAT: loss " in text and "gap recovered by GPTQ: loss " in text
    assert "on disk: 1.01 MB instead of 2.6" in text


def test_a_gap_that_cannot_be_stated_is_explained(tmp_path):
    text = summary(read(invented_run(tmp_path / "run", gap=0.00001)))
    assert "not clearly above zero" in " ".join(text.split()) and "gap recovered by QAT: KL" in text
    assert all(len(line) < 100 for line in text.splitlines())
