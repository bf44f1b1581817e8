"""What is drawn from a run's folder: self-contained, accessible, true to metrics.json, also for odd results."""

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from invented_run import invented_run, read

from eval.figures import standalone, ticks
from eval.report import Report, figures_of, main, write_report
from eval.words import number, percent, sentences, size, title

VOID = {"meta", "br", "img", "input", "link", "hr"}


class Page(HTMLParser):
    """Attributes that could fetch something, tags that are left open, and all text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.tags, self.text = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href", "srcset", "action", "data")]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def html(run):
    return write_report(run).read_text()


def test_page_is_self_contained_and_well_formed(html):
    page = Page(html)
    assert page.open == [] and page.links == []
    assert not {"script", "link", "iframe", "object", "img"} & set(page.tags)
    assert not re.search(r"https?:|url\(|@import|//[a-z]", html)
    assert 20_000 < len(html) < 200_000


def test_page_is_accessible_and_follows_the_reader(html):
    assert '<html lang="en">' in html and "width=device-width" in html and "prefers-color-scheme:dark" in html
    figures = re.findall(r"<svg class=\"fig\"[^>]*>", html)
    assert len(figures) == 5
    assert all('role="img"' in f and len(re.search(r'aria-label="([^"]*)"', f)[1]) > 60 for f in figures)
    assert html.count("<h1>") == 1 and 'scope="row"' in html and 'scope="col"' in html


def test_numbers_are_those_of_metrics_json(run, html):
    entry = read(run)["schemes"]["w4a16_g32"]
    text = Page(html).text
    for column in ("base", "fp_ft", "rtn", "gptq", "qat"):
        assert number(entry["loss"][column]) in text
    assert number(entry["delta_loss"]["qat"], 4, True) in text and number(entry["kl"]["gptq"]) in text
    assert percent(entry["gap_recovered"]["loss"]) in text and percent(entry["gap_recovered"]["kl"]) in text
    assert size(entry["bytes"]) in text and "0123abc" in text and "python train.py" in text
    assert "<b>not markup</b>" in text and "<b>not markup</b>" not in html


def test_best_is_the_smallest_of_the_quantised(run, html):
    bold = re.findall(r'<span class="best">([^<]*)</span>', html)
    entry = read(run)["schemes"]["w4a16_g32"]
    quantised = ("rtn", "gptq", "qat")
    assert bold == [number(min(entry["delta_loss"][c] for c in quantised), 4, True),
                    number(min(entry["kl"][c] for c in quantised))]  # fmt: skip


def test_markdown_shows_figures_that_exist(run, html):
    text = (run / "report" / "report.md").read_text()
    names = re.findall(r"!\[[^\]]{20,}\]\(([^)]*)\)", text)
    assert len(names) == 5 and all((run / "report" / n).is_file() for n in names)
    for name in names:
        root = ET.fromstring((run / "report" / name).read_text())
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.find("{*}title") is not None
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert "Gap recovered in loss: " in text and len(tables) > 20
    assert not list((run / "report").rglob("*.tmp"))


def test_figures_are_valid_xml_for_deep_models_and_peers(tmp_path):
    run = invented_run(tmp_path / "deep", layers=61)
    metrics = read(run)
    entry = metrics["schemes"]["w4a16_g32"]
    for key in ("loss", "kl", "agreement", "accuracy", "delta_loss", "perplexity"):
        entry[key]["torchao_qat"], entry["ci95"][key]["torchao_qat"] = entry[key]["gptq"], entry["ci95"][key]["gptq"]
    found = [f for group in figures_of(Report(metrics)).values() for f in group]
    assert {f.name for f in found} == {f"w4a16_g32_{k}" for k in ("loss", "kl", "weights", "hidden")}
    for figure in found:
        root = ET.fromstring(standalone(figure.svg))
        width, height = map(float, root.get("viewBox").split()[2:])
        assert root.findall(".//{*}text")
        for node in root.findall(".//{*}text"):
            assert 0 <= float(node.get("x")) <= width and 0 <= float(node.get("y")) <= height
    assert "torchao_qat" in found[0].svg


@pytest.mark.parametrize("gap, expected", [(0.00001, "too little"), (0.0154, "QAT recovers")])
def test_titles(tmp_path, gap, expected):
    run = invented_run(tmp_path / "run", gap=gap)
    entry = read(run)["schemes"]["w4a16_g32"]
    assert expected in title(entry)
    page = Page(write_report(run).read_text())
    assert ("not clearly above zero" in page.text) == (gap < 0.001)


def test_bad_news_is_told(run):
    entry = read(run)["schemes"]["w4a16_g32"]
    entry["gap_recovered"]["loss"] = -0.4
    entry["delta_loss"]["qat"] = 0.02
    entry["qat_minus_gptq"]["loss"], entry["ci95"]["qat_minus_gptq"]["loss"] = 0.012, [0.010, 0.014]
    assert "did not beat" in title(entry)
    text = " ".join(sentences(entry, "s"))
    assert "the change is +0.0200" in text and "QAT is higher by 0.0120 (0.0100 to 0.0140)" in text


def test_partial_runs_are_drawn(tmp_path):
    run = invented_run(tmp_path / "run")
    metrics = read(run)
    entry = metrics["schemes"]["w4a16_g32"]
    for key in ("loss", "kl", "agreement", "accuracy", "delta_loss", "perplexity"):
        entry[key]["gptq"] = entry["ci95"][key]["gptq"] = None
    entry["bits_per_weight"] = entry["bytes"] = entry["bytes_bf16"] = entry["bytes_full"] = None
    (run / "metrics.json").write_text(json.dumps({"schemes": metrics["schemes"]}))
    (run / "config.yaml").unlink()
    (run / "coverage.json").write_text(json.dumps(metrics["coverage"]))
    page = Page(write_report(run).read_text())
    assert "GPTQ of the same" not in page.text and "routed experts" in page.text


def test_several_schemes(tmp_path):
    run = invented_run(tmp_path / "run", schemes=("w4a16_g32", "w3a16_g32"))
    text = write_report(run).read_text()
    assert "What survives at w3a16_g32" in text and "Error of weights, w3a16_g32" in text


def test_command_draws_again(run, capsys):
    (run / "report" / "report.html").unlink()
    main([str(run)])
    assert capsys.readouterr().out.strip() == str(run / "report" / "report.html")
    assert (run / "report" / "report.html").is_file()
    with pytest.raises(FileNotFoundError, match=r"no metrics\.json; give the folder of a finished run"):
        write_report(run / "logs")


def test_ticks_are_round_and_inside():
    assert ticks(0, 0.0154) == pytest.approx([0, 0.005, 0.01, 0.015])
    assert ticks(1.1432, 1.1871, 5) == pytest.approx([1.15, 1.16, 1.17, 1.18])
    assert ticks(-0.002, 0.001) == pytest.approx([-0.002, -0.001, 0, 0.001])
    assert ticks(3, 3) == [3]


def invented_routing(layers, experts, teacher="fp_ft"):
    """routing.json of loads that fall off, one expert of the first layer without a token."""
    raw = [[0.0 if (i, e) == (0, experts - 1) else 1 / (1 + e) for e in range(experts)] for i in range(layers)]
    load = [[v / sum(row) for v in row] for row in raw]
    interval = {"step": 150, "tokens": 1000, "topk_changed": [0.02 if teacher else None] * layers}
    return {"experts": experts, "top_k": 2, "layers": list(range(1, layers + 1)), "intervals": [interval],
            "load": {"qat": load, **({teacher: load} if teacher else {})}}  # fmt: skip


@pytest.mark.parametrize(("layers", "experts", "teacher"), [(2, 8, "fp_ft"), (58, 256, None)])
def test_loads_of_experts_are_drawn_where_they_were_measured(tmp_path, layers, experts, teacher):
    run = invented_run(tmp_path / "run")
    (run / "routing.json").write_text(json.dumps(invented_routing(layers, experts, teacher)))
    html = write_report(run).read_text()
    assert "Load of experts" in Page(html).text and html.count('class="fig"') == 6
    assert ("2.0\u00a0% of tokens go to another set of experts than in FP_ft" in html) == (teacher is not None)
    assert "figures/routing.svg" in (run / "report" / "report.md").read_text()
    root = ET.fromstring((run / "report" / "figures" / "routing.svg").read_text())
    width, height = map(float, root.get("viewBox").split()[2:])
    for node in [*root.iterfind(".//{*}text"), *root.iterfind(".//{*}rect")]:
        x, y = (float(node.get(k, "0")) for k in ("x", "y"))
        assert 0 <= x <= width and 0 <= y <= height
    amber = [r for r in root.iterfind(".//{*}rect") if "var(--c-rtn)" in (r.get("stroke"), r.get("fill"))]
    assert len(amber) == (2 if teacher else 1) and "1 expert without a token" in html


def test_the_report_says_which_part_was_scored(tmp_path):
    run = invented_run(tmp_path)
    assert "nothing was chosen on them" in write_report(run).read_text()
    metrics = json.loads((run / "metrics.json").read_text())
    metrics["facts"]["evaluated_on"] = "select"
    (run / "metrics.json").write_text(json.dumps(metrics))
    text = write_report(run).read_text()
    assert "of the select part, on which choices are made" in text and "nothing was chosen" not in text
