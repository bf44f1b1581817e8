"""The precision of groups over time, from events to a figure, and a report with and without them."""

import json
import xml.etree.ElementTree as ET

from invented_run import invented_run

from eval.figures import group_label, level_map, standalone
from eval.level_map import read_level_map
from eval.report import Report, figures_of, write_report

EXPERTS, FUSED = "model.layers.1.mlp.experts", "model.layers.0.self_attn.q_a_proj+kv_a_proj_with_mqa"


def write_events(folder, rows):
    lines = [
        json.dumps({"kind": "precision", "n": n, "step": step, "group": group, "from": a, "to": b, "statistic": None})
        for n, (step, group, a, b) in enumerate(rows)
    ]
    (folder / "events.jsonl").write_text("\n".join([*lines, '{"kind": "guard", "n": 0}', '{"torn']))


ROWS = [(9, EXPERTS, "int4", "int8"), (19, FUSED, "int4", "int8"), (29, FUSED, "int8", "bf16"),
        (39, EXPERTS, "int8", "int4")]  # fmt: skip


def test_spans_follow_the_decisions(tmp_path):
    assert read_level_map(tmp_path) is None
    write_events(tmp_path, ROWS)
    found = read_level_map(tmp_path, 50, 100)
    assert found.rows == {
        EXPERTS: ((100, 110, "int4"), (110, 140, "int8"), (140, 150, "int4")),
        FUSED: ((100, 120, "int4"), (120, 130, "int8"), (130, 150, "bf16")),
    }
    assert found.levels == ["int4", "int8", "bf16"]
    write_events(tmp_path, [(0, EXPERTS, "bf16", "int8")])
    assert read_level_map(tmp_path, 1).rows == {EXPERTS: ((0, 1, "bf16"),)}


def test_figure_is_valid_and_inside_its_box(tmp_path):
    groups = [f"model.layers.{i}.mlp.shared_experts.gate_proj+up_proj" for i in range(61)]
    write_events(tmp_path, [*ROWS, *((40 + i, g, "int4", "bf16") for i, g in enumerate(groups))])
    for steps in (None, 4000):
        root = ET.fromstring(standalone(level_map("Precision", read_level_map(tmp_path, steps))))
        width, height = map(float, root.get("viewBox").split()[2:])
        texts = root.findall(".//{*}text")
        assert len(texts) > 60
        for node in texts:
            assert 0 <= float(node.get("x")) <= width and 0 <= float(node.get("y")) <= height
        assert len(root.findall(".//{*}title")) == 1 + 6 + 2 * 61
    assert group_label(FUSED) == "0 q_a+kv_a" and group_label(groups[7]) == "7 shared gate+up"


def test_report_with_and_without_events(tmp_path):
    run = invented_run(tmp_path / "run")
    assert [f.name for f in figures_of(Report.from_folder(run))["training"]] == ["curves"]
    write_events(run, ROWS)
    report = Report.from_folder(run)
    assert [f.name for f in figures_of(report)["training"]] == ["curves", "precision"]
    assert (report.levels.first, report.levels.last) == (150, 300)
    assert "Precision while training" in write_report(run).read_text()
    assert (run / "report" / "figures" / "precision.svg").is_file()
