"""The report as one self-contained HTML page: inline CSS and SVG, no script, nothing fetched.

Order: the finding in a sentence, four numbers, the table, then figures, coverage, and how the run was made.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from eval.figures import FIGURE_CSS, THEME
from eval.words import HEADINGS, MEANING, NONE, Entry, duration, name_of, number, percent, size, span, table_rows

PAGE_CSS = """
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 ui-sans-serif,system-ui,-apple-system,
"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1040px;margin:0 auto;padding:56px 28px 72px}
.kicker{margin:0 0 10px;max-width:none;color:var(--ink2);font-size:14px}
.kicker b{color:var(--c-qat);font-weight:600}
h1{margin:0;font:600 clamp(28px,4.6vw,44px)/1.14 "Iowan Old Style","Palatino Linotype",Palatino,"Book Antiqua",Georgia,
"DejaVu Serif",serif;letter-spacing:-.012em;max-width:22em;text-wrap:balance}
h2{margin:60px 0 6px;font:600 23px/1.25 "Iowan Old Style","Palatino Linotype",Palatino,"Book Antiqua",Georgia,
"DejaVu Serif",serif}
h3{margin:0 0 2px;font-size:16px;font-weight:600}
p{margin:0 0 12px;max-width:68ch}
.lede{margin-top:18px;font-size:17.5px;color:var(--ink2)}
.sub{color:var(--ink2);font-size:14.5px}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);gap:0;margin:36px 0 0;padding:0;list-style:none;
border-top:2px solid var(--ink);border-bottom:1px solid var(--rule)}
.tiles li{padding:16px 18px 18px}
.tiles li+li{border-left:1px solid var(--rule)}
.tiles li:first-child{padding-left:0}
.tiles .value{display:block;font-size:30px;font-weight:600;line-height:1.2;letter-spacing:-.02em;
font-variant-numeric:tabular-nums}
.tiles li:first-child .value{color:var(--c-qat)}
.tiles .label{display:block;font-size:14px}
.tiles .note{display:block;font-size:13px;color:var(--ink2)}
.scroll{overflow-x:auto;margin:18px 0 0;-webkit-overflow-scrolling:touch}
.scroll:focus-visible{outline:2px solid var(--c-qat);outline-offset:4px}
table{border-collapse:collapse;width:100%;font-size:15px;font-variant-numeric:tabular-nums}
th,td{padding:10px 12px;text-align:right;vertical-align:top;border-bottom:1px solid var(--rule);white-space:nowrap}
thead th{font-size:13px;font-weight:500;color:var(--ink2);vertical-align:bottom;border-bottom:1px solid var(--ink2);
white-space:normal;line-height:1.3}
th:first-child{text-align:left;padding-left:10px;position:sticky;left:0;background:var(--paper)}
td:last-child,thead th:last-child{padding-right:10px}
tbody th{font-weight:600}
tbody th .dot{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:9px}
td .note,th .note{display:block;font-size:12.5px;font-weight:400;color:var(--ink2)}
th .note{padding-left:19px}
tr.qat td,tr.qat th{background:color-mix(in srgb,var(--c-qat) 8%,var(--paper))}
td .best{font-weight:650}
.words td,.words th{text-align:left;white-space:normal}
.words th:first-child{padding-left:0}
.words td.num,.words th.num{text-align:right;white-space:nowrap}
.figures{display:grid;grid-template-columns:1fr 1fr;gap:22px;margin-top:26px}
figure{margin:0;padding:18px 20px 14px;background:var(--card);border:1px solid var(--rule);border-radius:6px;
min-width:0}
.figures .tall{grid-row:span 2}
figure svg{display:block;max-width:520px;width:100%;height:auto;margin-top:10px}
figcaption .sub{margin:0;font-size:13.5px;line-height:1.45}
.meter{display:block;height:8px;margin-top:7px;background:var(--grid);border-radius:2px;min-width:90px}
.meter i{display:block;height:8px;border-radius:2px;background:var(--c-qat)}
.meter i.kept{background:var(--c-base)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:0;margin:16px 0 0;font-size:15px}
dt,dd{padding:8px 0;margin:0;border-bottom:1px solid var(--rule)}
dt{color:var(--ink2);padding-right:28px}
dd{overflow-wrap:anywhere}
code,pre{font:13.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre{margin:12px 0 0;padding:16px;background:var(--card);border:1px solid var(--rule);border-radius:6px;overflow-x:auto}
details{margin-top:22px}summary{cursor:pointer;color:var(--ink2)}
.notes{padding-left:18px;color:var(--ink2);font-size:14.5px;max-width:74ch}
.notes li{margin-bottom:6px}
@media (max-width:720px){
main{padding:30px 18px 48px}
.tiles{grid-template-columns:1fr 1fr}
.tiles li{padding:14px 14px 14px 0}
.tiles li+li{border-left:0}
.tiles li:nth-child(even){padding-left:16px;border-left:1px solid var(--rule)}
.tiles li:nth-child(n+3){border-top:1px solid var(--rule)}
.tiles .value{font-size:26px}
.figures{grid-template-columns:1fr;gap:14px}
figure{padding:14px 12px 10px}
h2{margin-top:44px}
.results th .note{display:none}
.results th:first-child{padding:10px 8px 10px 6px}
dl{grid-template-columns:1fr}dt{border:0;padding:10px 0 0}dd{padding-top:0}
.words th.wide,.words td.wide{display:none}
}
@media print{main{max-width:none;padding:0}figure,tr{break-inside:avoid}}
"""


def page(heading: str, body: str) -> str:
    """A whole document."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(heading)}</title><style>{THEME}{FIGURE_CSS}{PAGE_CSS}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def header(kicker: Sequence[str], heading: str, lede: str) -> str:
    """Where this comes from, the finding, and what it means."""
    origin = " · ".join([f"<b>{escape(kicker[0])}</b>", *(escape(k) for k in kicker[1:])])
    return f'<p class="kicker">{origin}</p>\n<h1>{escape(heading)}</h1>\n<p class="lede">{escape(lede)}</p>'


def tiles(entry: Entry) -> str:
    """Four numbers: recovered loss, recovered KL, same token, size."""
    gap, ci = entry["gap_recovered"], entry["ci95"]
    found = [
        (percent(gap["loss"]), "of the rounding loss recovered", span(ci["gap_recovered"]["loss"], 0, 100)),
        (percent(gap["kl"]), "recovered in KL to FP_ft", span(ci["gap_recovered"]["kl"], 0, 100)),
        (percent(entry["agreement"]["qat"], 1), "same top token as FP_ft", span(ci["agreement"]["qat"], 1, 100)),
    ]
    full = f"{size(entry['bytes_bf16'])} in bf16" if entry["bytes_bf16"] else ""
    bits = f"{number(entry['bits_per_weight'], 2)} bits per weight" if entry["bits_per_weight"] else "on disk"
    missing = "not clearly measurable here"
    items = "".join(
        _tile(value, label, f"95\u00a0% interval {note}" if note else missing if value == NONE else "")
        for value, label, note in found
    )
    return f'<ul class="tiles">{items}{_tile(size(entry["bytes"]), bits, full)}</ul>'


def _tile(value: str, label: str, note: str) -> str:
    return (f'<li><span class="value">{escape(value)}</span><span class="label">{escape(label)}</span>'
            f'<span class="note">{escape(note)}</span></li>')  # fmt: skip


def results(entry: Entry, caption: str) -> str:
    """The main table: a row for each column of the comparison."""
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in HEADINGS)
    body = ""
    for column, cells in table_rows(entry):
        dot = f'<span class="dot" style="background:var(--c-{column},var(--c-other))"></span>'
        meaning = MEANING.get(column, f"FP_ft through {column}")
        body += f'<tr class="{escape(column)}"><th scope="row">{dot}{escape(name_of(column))}'
        body += f'<span class="note">{escape(meaning)}</span></th>'
        for cell in cells:
            value = f'<span class="best">{escape(cell.text)}</span>' if cell.best else escape(cell.text)
            note = f'<span class="note">{escape(cell.note)}</span>' if cell.note else ""
            body += f"<td>{value}{note}</td>"
        body += "</tr>\n"
    return (
        f'<p class="sub">{escape(caption)}</p>'
        f'<div class="scroll" role="region" aria-label="Results" tabindex="0"><table class="results"><thead><tr>'
        f'<th scope="col">model</th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def figure(svg: str, heading: str, caption: str, tall: bool = False) -> str:
    opening = '<figure class="tall">' if tall else "<figure>"
    return (f"{opening}<figcaption><h3>{escape(heading)}</h3><p class=\"sub\">{escape(caption)}</p></figcaption>"
            f"{svg}</figure>")  # fmt: skip


def section(heading: str, sub: str, body: str) -> str:
    note = f'<p class="sub">{escape(sub)}</p>' if sub else ""
    return f"<section><h2>{escape(heading)}</h2>{note}{body}</section>"


def coverage_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Coverage rows, largest first: part, module class, scheme, parameters, share."""
    largest = max((r["share"] for r in rows), default=1.0) or 1.0
    body = ""
    for row in rows:
        kept = row["scheme"] == "kept"
        meter = f'<i class="{"kept" if kept else "quantised"}" style="width:{100 * row["share"] / largest:.1f}%"></i>'
        body += (
            f'<tr><th scope="row">{escape(row["part"].replace("_", " "))}</th>'
            f'<td class="wide"><code>{escape(row["module_class"])}</code></td><td>{escape(row["scheme"])}</td>'
            f'<td class="num">{row["parameters"]:,}</td><td class="num">{percent(row["share"], 1)}'
            f'</td><td class="wide"><span class="meter" aria-hidden="true">{meter}</span></td></tr>\n'
        )
    return (
        f'<div class="scroll" role="region" aria-label="Coverage" tabindex="0"><table class="words"><thead><tr>'
        f'<th scope="col">part</th><th scope="col" class="wide">module class</th><th scope="col">scheme</th>'
        f'<th scope="col" class="num">parameters</th><th scope="col" class="num">share</th>'
        f'<th scope="col" class="wide"></th></tr></thead><tbody>{body}</tbody></table></div>'
    )


def seconds_table(seconds: Mapping[str, float]) -> str:
    longest = max(seconds.values()) or 1.0
    body = "".join(
        f'<tr><th scope="row">{escape(name_of(stage))}</th><td class="num">{duration(s)}</td>'
        f'<td style="width:60%"><span class="meter" aria-hidden="true"><i style="width:{100 * s / longest:.1f}%"></i>'
        f"</span></td></tr>\n" for stage, s in seconds.items()
    )  # fmt: skip
    return f'<table class="words"><thead><tr><th scope="col">stage</th><th scope="col" class="num">time</th>' \
           f"<th></th></tr></thead><tbody>{body}</tbody></table>"  # fmt: skip


def facts_list(facts: Sequence[tuple[str, str]]) -> str:
    def value(name: str, text: str) -> str:
        return f"<code>{escape(text)}</code>" if name in ("command", "commit", "data sha256") else escape(text)

    return "<dl>" + "".join(f"<dt>{escape(n)}</dt><dd>{value(n, t)}</dd>" for n, t in facts) + "</dl>"


def config_block(config: str) -> str:
    return f"<details><summary>Resolved configuration</summary><pre>{escape(config)}</pre></details>"


def notes_list(notes: Sequence[str]) -> str:
    return '<ul class="notes">' + "".join(f"<li>{escape(n)}</li>" for n in notes) + "</ul>"
