"""Figures as SVG text: bars with intervals, curves, heat maps. No library, no script, no outside resource.

Colours are CSS variables (`THEME`), so that one figure follows the light or dark mode of the page it lies in; as
a file of its own it carries the same rules. Every figure is about 440 units wide with 13-unit type: two stand
beside each other on a desk, one fills a phone, and the type stays readable on both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from eval.curves import Curve, smooth
from eval.error_map import ErrorMap
from eval.level_map import LevelMap
from eval.words import name_of

WIDTH = 440

THEME = """
:root{--paper:#faf9f6;--card:#ffffff;--ink:#1f242a;--ink2:#5a626c;--rule:#e3e0d8;--grid:#ebe9e2;
--c-base:#a3a9b1;--c-fp_ft:#4d5661;--c-rtn:#b9770e;--c-gptq:#7d6b9e;--c-qat:#0b6e8f;--c-other:#6f8a5a;--heat:#0b6e8f}
@media (prefers-color-scheme:dark){:root{--paper:#131619;--card:#1a1e22;--ink:#e7e5df;--ink2:#9ba4ae;--rule:#2e343a;
--grid:#272c32;--c-base:#78808a;--c-fp_ft:#c5cbd2;--c-rtn:#e0aa4e;--c-gptq:#ab9ad0;--c-qat:#56b7d6;--c-other:#9dbb84;
--heat:#56b7d6}}
"""
FIGURE_CSS = """
.fig text{font:13px ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
fill:var(--ink2);font-variant-numeric:tabular-nums}
.fig .strong{fill:var(--ink);font-weight:600}.fig .small{font-size:11.5px}
.fig .inverse{fill:var(--card)}.fig .dark{fill:var(--ink)}
.fig .grid{stroke:var(--grid)}.fig .axis{stroke:var(--rule)}
.fig .whisker{stroke:var(--ink);stroke-width:1.4;fill:none}.fig .line{fill:none;stroke-width:2;stroke-linejoin:round}
"""


@dataclass(frozen=True)
class Bar:
    """A column's value with its interval; `text` stands at the end of the bar."""

    column: str
    value: float
    interval: Sequence[float] | None
    text: str


def colour(column: str) -> str:
    known = ("base", "fp_ft", "rtn", "gptq", "qat")
    return f"var(--c-{column if column in known else 'other'})"


def svg(body: str, height: float, title: str, description: str) -> str:
    """An accessible inline figure."""
    return (
        f'<svg class="fig" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}. '
        f'{escape(description)}"><title>{escape(title)}</title><desc>{escape(description)}</desc>{body}</svg>'
    )


def standalone(figure: str) -> str:
    """The figure as a file: namespace, theme and background included."""
    ground = f'<style>{THEME}{FIGURE_CSS}</style><rect width="100%" height="100%" fill="var(--card)"/>'
    opening = '<svg xmlns="http://www.w3.org/2000/svg" class="fig"'
    return figure.replace('<svg class="fig"', opening, 1).replace("<title>", ground + "<title>", 1)


def text(x: float, y: float, content: str, classes: str = "", anchor: str = "start") -> str:
    attributes = f' class="{classes}"' if classes else ""
    end = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}{end}>{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, classes: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{classes}"/>'


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers inside [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_label(value: float, step: float) -> str:
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step else 0
    digits += round(step * 10**digits) != 0 and abs(step * 10**digits - round(step * 10**digits)) > 1e-6
    return f"{value:,.{digits}f}".replace("-", "−")


def bars(title: str, rows: Sequence[Bar], unit: str) -> str:
    """Horizontal bars from zero, whiskers for intervals, values as text."""
    left = max(62.0, 20 + 7.2 * max(len(name_of(row.column)) for row in rows))
    right, top, pitch = 74, 10, 40
    bounds = [0.0, *(r.value for r in rows), *(x for r in rows for x in r.interval or ())]
    low, high = min(bounds), max(bounds) or 1.0
    scale = (WIDTH - left - right) / ((high - low) or 1.0)

    def x(v: float) -> float:
        return left + (v - low) * scale

    height = top + pitch * len(rows) + 26
    marks = ticks(low, high)
    step = marks[1] - marks[0] if len(marks) > 1 else 1.0
    body = ""
    for mark in marks:
        body += line(x(mark), top, x(mark), height - 22, "axis" if mark == 0 else "grid")
        body += text(x(mark), height - 6, tick_label(mark, step), "small", "middle")
    for i, row in enumerate(rows):
        y = top + pitch * i + pitch / 2
        a, b = sorted((x(0), x(row.value)))
        body += text(left - 10, y + 4.5, name_of(row.column), "strong" if row.column == "qat" else "", "end")
        body += (f'<rect x="{a:.1f}" y="{y - 11:.1f}" width="{max(1.5, b - a):.1f}" height="22" rx="2" '
                 f'fill="{colour(row.column)}"/>')  # fmt: skip
        end = b
        if row.interval is not None:
            p, q = (x(v) for v in row.interval)
            path = f"M{p:.1f} {y - 5:.1f}v10M{q:.1f} {y - 5:.1f}v10M{p:.1f} {y:.1f}H{q:.1f}"
            body += f'<path d="{path}" class="whisker"/>'
            end = max(end, q)
        body += text(end + 8, y + 4.5, row.text, "strong" if row.column == "qat" else "")
    summary = "; ".join(f"{name_of(r.column)} {r.text}" for r in rows)
    return svg(body, height, title, f"Bars in {unit}: {summary}.")


@dataclass(frozen=True)
class Frame:
    """Linear axes of a line plot: data (step, value) to points of the figure."""

    steps: tuple[float, float]
    values: tuple[float, float]
    left: float = 50
    right: float = WIDTH - 14
    top: float = 30
    bottom: float = 240

    def point(self, step: float, value: float) -> tuple[float, float]:
        (first, last), (low, high) = self.steps, self.values
        up = (value - low) / (high - low)
        across = (step - first) / (last - first)
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)

    def axes(self) -> str:
        body, marks = "", ticks(*self.values, 5)
        for mark in marks:
            y = self.point(self.steps[0], mark)[1]
            label = tick_label(mark, marks[1] - marks[0] if len(marks) > 1 else 1.0)
            body += line(self.left, y, self.right, y, "grid") + text(self.left - 8, y + 4, label, "small", "end")
        for mark in ticks(*self.steps, 4):
            body += text(self.point(mark, 0)[0], self.bottom + 18, f"{mark:,.0f}", "small", "middle")
        return body + text(self.right, self.bottom + 34, "optimizer step", "small", "end")

    def clip(self, body: str) -> str:
        """`body` without what lies outside the frame."""
        x, y, w, h = self.left, self.top, self.right - self.left, self.bottom - self.top
        return f'<svg x="{x}" y="{y}" width="{w}" height="{h}" viewBox="{x} {y} {w} {h}">{body}</svg>'

    def polyline(self, curve: Curve, attributes: str) -> str:
        points = " ".join("{:.1f},{:.1f}".format(*self.point(s, v)) for s, v in zip(curve.steps, curve.values))
        return f'<polyline points="{points}" class="line" stroke="{colour(curve.stage)}" {attributes}/>'


def curves(title: str, found: Sequence[Curve]) -> str:
    """Training loss (thin, smoothed: batches differ far more than steps) and select loss (firm, with dots)."""
    train = [smooth(c) for c in found if c.kind == "train"]
    select = [c for c in found if c.kind == "select"]
    steps = [s for c in found for s in c.steps]
    values = sorted(v for c in train for v in c.values)
    kept = values[len(values) // 50 : len(values) - len(values) // 50]
    kept += [v for c in select for v in c.values]
    pad = 0.1 * (max(kept) - min(kept)) or 0.01
    frame = Frame((min(steps), max(max(steps), min(steps) + 1)), (min(kept) - pad, max(kept) + pad))
    thin = "".join(frame.polyline(c, 'style="stroke-width:1.2" opacity=".5"') for c in train)
    firm = "".join(frame.polyline(c, "") + _dots(frame, c) for c in select)
    return svg(frame.axes() + frame.clip(thin) + firm + _legend(found), 280, title, _ends(found))


def _dots(frame: Frame, curve: Curve) -> str:
    points = (frame.point(s, v) for s, v in zip(curve.steps, curve.values))
    return "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour(curve.stage)}"/>' for x, y in points)


def _legend(found: Sequence[Curve]) -> str:
    x, body = 50.0, ""
    for c in found:
        label, fill = f"{name_of(c.stage)} {c.kind}", colour(c.stage)
        if c.kind == "train":
            body += f'<path d="M{x:.1f} 12h18" class="line" style="stroke-width:1.2" opacity=".6" stroke="{fill}"/>'
        else:
            body += f'<path d="M{x:.1f} 12h18" class="line" stroke="{fill}"/>'
            body += f'<circle cx="{x + 9:.1f}" cy="12" r="3.2" fill="{fill}"/>'
        body += text(x + 23, 16.5, label, "small")
        x += 34 + 6.3 * len(label)
    return body


def _ends(found: Sequence[Curve]) -> str:
    ends = (
        f"{name_of(c.stage)} {c.kind} loss goes from {c.values[0]:.4f} at step {c.steps[0]} "
        f"to {c.values[-1]:.4f} at step {c.steps[-1]}" for c in found if c.values
    )  # fmt: skip
    return "; ".join(ends) + "."


def part_label(part: str) -> str:
    """`shared_experts.gate_proj` -> `shared gate`: short enough to stand beside a row."""
    short = part.replace("_with_mqa", "").replace("_proj", "").replace("shared_experts.", "shared ")
    return short.replace("experts.", "experts ").replace("gate_up", "gate·up")


def heat_map(title: str, maps: Sequence[tuple[str, ErrorMap]]) -> str:
    """Relative errors in percent, parts down and layers across, one block for each column on one colour scale."""
    parts = list(dict.fromkeys(p for _, m in maps for p in m.parts))
    deepest = max(len(m.layers) for _, m in maps)
    left, gap, room = 118, 12, WIDTH - 118 - 4
    beside = len(maps) * deepest * 15 + gap * (len(maps) - 1) <= room
    width = (room - gap * (len(maps) - 1)) / len(maps) if beside else room
    cell = min(46.0, width / deepest)
    pitch = 29.0 if beside else 17.0
    block = 26 + pitch * len(parts) + 22
    top = max(m.largest for _, m in maps)
    body = ""
    for i, (name, m) in enumerate(maps):
        x0, y0 = (left + i * (width + gap), 0.0) if beside else (float(left), i * (block + 10))
        body += _block(name, m, parts, (x0, y0), (cell, pitch), top, labels=not beside or i == 0)
    height = (block if beside else len(maps) * (block + 10)) + 30
    body += colour_scale(left, height - 18, "error", f"0 to {100 * top:.1f} %")
    worst = "; ".join(f"{name_of(name)} up to {100 * m.largest:.1f} percent" for name, m in maps)
    return svg(body, height, title, f"Relative error for {len(parts)} parts of {deepest} layers: {worst}.")


def _block(
    name: str, m: ErrorMap, parts: Sequence[str], origin: tuple[float, float], cell: tuple[float, float],
    top: float, labels: bool,
) -> str:  # fmt: skip
    (x0, y0), (w, h) = origin, cell
    body = text(x0, y0 + 15, name_of(name), "strong")
    every = max(1, math.ceil(22 / w))
    for j, layer in enumerate(m.layers):
        if j % every == 0:
            body += text(x0 + (j + 0.5) * w, y0 + 26 + h * len(parts) + 15, str(layer), "small", "middle")
    for k, part in enumerate(parts):
        y = y0 + 26 + k * h
        if labels:
            body += text(x0 - 10, y + h / 2 + 4.5, part_label(part), "small", "end")
        for j, layer in enumerate(m.layers):
            error = m.error[j][m.parts.index(part)] if part in m.parts else None
            if error is None:
                continue
            share = error / top if top else 0.0
            inset = min(0.75, 0.08 * w)
            body += (
                f'<rect x="{x0 + j * w + inset:.2f}" y="{y + inset:.2f}" width="{w - 2 * inset:.2f}" '
                f'height="{h - 2 * inset:.2f}" rx="{min(2.0, w / 6):.1f}" fill="var(--heat)" '
                f'fill-opacity="{0.05 + 0.95 * share:.3f}"><title>{escape(name_of(name))}, layer '
                f"{layer}, {escape(part)}: {100 * error:.2f} %</title></rect>"
            )
            if w >= 30:
                classes = "small inverse" if share > 0.72 else "small dark"
                body += text(x0 + (j + 0.5) * w, y + h / 2 + 4, f"{100 * error:.1f}", classes, "middle")
    return body


def level_map(title: str, found: LevelMap) -> str:
    """Steps across, fusion groups down, the darker the more bits."""
    left, right, top = 150.0, WIDTH - 14.0, 30.0
    pitch = 20.0 if len(found.rows) <= 24 else 14.0
    bottom = top + pitch * len(found.rows)
    frame = Frame((found.first, max(found.last, found.first + 1)), (0, 1), left, right, top, bottom)
    depth = {level: 0.14 + 0.8 * i / max(1, len(found.levels) - 1) for i, level in enumerate(found.levels)}
    body, x = "", left
    for level in found.levels:
        body += f'<rect x="{x:.1f}" y="4" width="14" height="12" fill="var(--heat)" fill-opacity="{depth[level]:.2f}"/>'
        body += text(x + 19, 14, level, "small")
        x += 34 + 7 * len(level)
    for i, (group, spans) in enumerate(found.rows.items()):
        y = top + pitch * i
        body += text(left - 8, y + pitch / 2 + 4, group_label(group), "small", "end")
        for begin, end, level in spans:
            a, b = frame.point(begin, 0)[0], frame.point(end, 0)[0]
            body += (
                f'<rect x="{a:.2f}" y="{y + 0.75:.2f}" width="{b - a:.2f}" height="{pitch - 1.5:.2f}" '
                f'fill="var(--heat)" fill-opacity="{depth[level]:.2f}"><title>{escape(group)}: {level}, steps {begin} '
                f"to {end - 1}</title></rect>"
            )
    for mark in ticks(*frame.steps, 4):
        body += text(frame.point(mark, 0)[0], bottom + 16, f"{mark:,.0f}", "small", "middle")
    body += text(right, bottom + 32, "optimizer step", "small", "end")
    above = sum(end - begin for spans in found.rows.values() for begin, end, level in spans if level != spans[-1][2])
    about = (
        f"Levels {', '.join(found.levels)} of {len(found.rows)} fusion groups that changed, steps {found.first} to "
        f"{found.last - 1}; {above} group steps at another level than the last."
    )
    return svg(body, bottom + 40, title, about)


def group_label(group: str) -> str:
    """`model.layers.1.self_attn.q_a_proj+kv_a_proj_with_mqa` -> `1 q_a+kv_a`: layer and parts."""
    parts = group.split(".")
    layer = next((part for part in parts if part.isdigit()), "")
    shared = "shared " if "shared" in group else ""
    leaf = parts[-1].replace("_with_mqa", "").replace("_proj", "")
    return f"{layer} {shared}{leaf}".strip()


def colour_scale(x: float, y: float, name: str, ends: str) -> str:
    """The shades of a heat map from 0 to its largest value, with the quantity's name before and its ends after."""
    body = text(x - 10, y + 11, name, "small", "end")
    for i in range(20):
        body += (f'<rect x="{x + i * 7:.1f}" y="{y:.1f}" width="7.2" height="12" fill="var(--heat)" '
                 f'fill-opacity="{0.05 + 0.95 * (i + 0.5) / 20:.3f}"/>')  # fmt: skip
    return body + text(x + 148, y + 11, ends, "small")
