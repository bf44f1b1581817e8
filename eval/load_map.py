"""How the tokens of a run were spread over its experts, from routing.json: layers down, experts across.

A cell's colour is the expert's share of its layer's choices times the number of experts: 1 is even, 0 an expert
without a token (amber), E / K the most that one of E experts can get when each token chooses K.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from eval.figures import WIDTH, colour_scale, svg, text
from eval.words import name_of, number, percent

LEFT, ROOM = 62, WIDTH - 62 - 8


@dataclass(frozen=True)
class LoadMap:
    """Relative loads of each model, layers × experts, and the share of tokens with another top-k set (or None)."""

    layers: tuple[int, ...]
    experts: int
    top_k: int
    step: int
    relative: Mapping[str, Sequence[Sequence[float]]]
    changed: float | None

    @classmethod
    def from_folder(cls, run: Path) -> "LoadMap | None":
        """None where the run measured no routing."""
        file = run / "routing.json"
        return cls.from_dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LoadMap":
        experts, last = values["experts"], values["intervals"][-1]
        relative = {
            model: [[experts * share for share in layer] for layer in layers]
            for model, layers in sorted(values["load"].items(), key=lambda item: item[0] == "qat")
        }
        changed = [c for c in last["topk_changed"] if c is not None]
        return cls(
            tuple(values["layers"]), experts, values["top_k"], last["step"], relative,
            sum(changed) / len(changed) if changed else None,
        )  # fmt: skip

    @property
    def largest(self) -> float:
        return max(r for layers in self.relative.values() for layer in layers for r in layer)

    def unused(self, model: str) -> int:
        """Experts of all layers without a token."""
        return sum(r == 0 for layer in self.relative[model] for r in layer)

    @property
    def caption(self) -> str:
        found = f"share of a layer's choices, 1 is even; layers down, experts across; up to step {self.step:,} of QAT"
        if self.changed is None:
            return found
        other = next(m for m in self.relative if m != "qat")
        return f"{found}; {percent(self.changed, 1)} of tokens go to another set of experts than in {name_of(other)}"


def load_map(title: str, found: LoadMap) -> str:
    """One block of cells for each model, on one colour scale."""
    top, w = max(found.largest, 1.0), min(46.0, ROOM / found.experts)
    h = 29.0 if len(found.layers) <= 8 else 8.0
    block = 26 + h * len(found.layers) + 10
    body = ""
    for i, model in enumerate(found.relative):
        body += _block(found, model, i * block, (w, h), top)
    bottom = block * len(found.relative)
    every = max(1, -(-22 // int(max(1, w))))
    for e in range(0, found.experts, every):
        body += text(LEFT + (e + 0.5) * w, bottom + 6, str(e), "small", "middle")
    body += colour_scale(LEFT, bottom + 18, "load", f"0 to {number(top, 2)}; in amber: no token")
    counts = "; ".join(f"{name_of(m)}: {_experts(found.unused(m))} without a token, largest load "
                       f"{number(max(r for layer in rows for r in layer), 2)} times the even one"
                       for m, rows in found.relative.items())  # fmt: skip
    words = f"Loads of {found.experts} experts in {len(found.layers)} layers. {counts}."
    return svg(body, bottom + 34, title, words)


def _experts(count: int) -> str:
    return "1 expert" if count == 1 else f"{count} experts"


def _block(found: LoadMap, model: str, y0: float, cell: tuple[float, float], top: float) -> str:
    w, h = cell
    body = text(LEFT, y0 + 15, name_of(model), "strong")
    every = max(1, -(-14 // int(h)))
    for j, (layer, loads) in enumerate(zip(found.layers, found.relative[model])):
        y = y0 + 24 + j * h
        if j % every == 0:
            body += text(LEFT - 10, y + h / 2 + 4.5, f"layer {layer}", "small", "end")
        for e, load in enumerate(loads):
            fill = f'fill="var(--heat)" fill-opacity="{0.05 + 0.95 * load / top:.3f}"'
            if w < 4:  # hundreds of experts: thousands of cells, so no more than a colour
                fill = 'fill="var(--c-rtn)"' if load == 0 else fill
                body += f'<rect x="{LEFT + e * w:.2f}" y="{y:.0f}" width="{w:.2f}" height="{h:.0f}" {fill}/>'
                continue
            ring = ' stroke="var(--c-rtn)" stroke-width="1.5"' if load == 0 else ""
            body += (
                f'<rect x="{LEFT + e * w + 0.75:.2f}" y="{y + 0.75:.2f}" width="{w - 1.5:.2f}" '
                f'height="{h - 1.5:.2f}" rx="1" {fill}{ring}><title>{escape(name_of(model))}, layer {layer}, '
                f"expert {e}: {load:.2f}</title></rect>"
            )
            if w >= 30 and h >= 20:
                classes = "small inverse" if load / top > 0.72 else "small dark"
                body += text(LEFT + (e + 0.5) * w, y + h / 2 + 4, f"{load:.2f}", classes, "middle")
    return body
