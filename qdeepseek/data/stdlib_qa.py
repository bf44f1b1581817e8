"""Questions and answers about the standard library, made from its signatures and docstrings.

For every public module, class, function and method of the running Python: what it does (first sentence of its
docstring), how it is called, which arguments it takes, their defaults, and which name fits a description.
Sources are parsed with `ast`, never imported. A row belongs to the part of the file it comes from (see
corpus.py), so the held-out questions are about files that pretraining did not see; a question, and a sentence
quoted from a docstring, belongs to one symbol only, train before select before report. The rows are made at
first use: nothing is stored.
"""

import ast
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qdeepseek.data.corpus import PARTS, Document, stdlib_documents
from qdeepseek.data.rows import Row
from qdeepseek.data.split import normalise

LIMITS = {"train": 5000, "select": 500, "report": 500}  # rows, chosen by the hash of the question
MAX_BYTES = 400  # question and answer: fits 512 byte tokens with the template's own
ALIASES = {"posixpath": "os.path"}
EXCLUDED = frozenset({"idlelib", "lib2to3", "distutils", "pydoc_data", "this", "antigravity"})
Function = ast.FunctionDef | ast.AsyncFunctionDef
Pair = tuple[str, str, bool]  # question, answer, whether the answer or the question quotes a docstring


@dataclass(frozen=True)
class _Symbol:
    module: str
    name: str  # dotted, with the module
    node: ast.Module | ast.ClassDef | Function
    method: bool = False

    @functools.cached_property
    def summary(self) -> str | None:
        return first_sentence(ast.get_docstring(self.node) or "")


@functools.cache
def instruction_rows() -> tuple[Row, ...]:
    """The shipped instruction set: chat rows with their part, always the same for one Python version."""
    return tuple(rows_from_documents(stdlib_documents(), LIMITS))


def rows_from_documents(documents: Sequence[Document], limits: Mapping[str, int] = LIMITS) -> list[Row]:
    """Rows about `documents`, in the order of parts and paths, duplicates and over-long ones left out."""
    rows: dict[str, Row] = {}
    quoted: set[str] = set()
    for document in sorted(documents, key=lambda d: (PARTS.index(d.part), d.path)):
        for symbol in _symbols(document):
            summary = normalise(symbol.summary or "")
            fresh = summary not in quoted
            for question, answer, quotes in _questions(symbol):
                key = normalise(question)
                if key in rows or (quotes and not fresh) or len((question + answer).encode()) > MAX_BYTES:
                    continue
                messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
                rows[key] = Row(f"{document.path}: {symbol.name}", messages=messages, part=document.part)
            quoted.add(summary)
    ranked = sorted(rows, key=lambda question: hashlib.sha256(question.encode()).digest())
    chosen = {q for part in PARTS for q in [q for q in ranked if rows[q].part == part][: limits[part]]}
    return [row for question, row in rows.items() if question in chosen]


def first_sentence(docstring: str) -> str | None:
    """First sentence of a docstring in one line; None for a signature, a doctest or two words."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    sentence = paragraph
    for end in range(1, len(paragraph) - 1):
        if paragraph[end : end + 2] == ". " and paragraph[end - 3 : end] not in ("i.e", "e.g"):
            sentence = paragraph[: end + 1]
            break
    signature = "->" in sentence or sentence.split("(")[0].isidentifier() or ">>>" in sentence
    if signature or len(sentence.split()) < 3 or len(sentence) > 240 or sentence.endswith(":"):
        return None
    return sentence if sentence.endswith((".", "!", "?")) else sentence + "."


def _symbols(document: Document) -> Iterator[_Symbol]:
    parts = document.path.removesuffix(".py").removesuffix("/__init__").split("/")
    if EXCLUDED.intersection(parts) or any(p.startswith("_") or not p.isidentifier() for p in parts):
        return
    try:
        tree = ast.parse(document.text)
    except SyntaxError:  # templates and deliberately broken files
        return
    module = ALIASES.get(".".join(parts), ".".join(parts))
    yield _Symbol(module, module, tree)
    for node in _definitions(tree.body):
        yield _Symbol(module, f"{module}.{node.name}", node)
        if isinstance(node, ast.ClassDef):
            for member in _definitions(node.body):
                if not isinstance(member, ast.ClassDef):
                    yield _Symbol(module, f"{module}.{node.name}.{member.name}", member, method=True)


def _definitions(body: Sequence[ast.stmt]) -> Iterator[ast.ClassDef | Function]:
    """Public definitions of a body, also those under a top-level `if` or `try`."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("_"):
                yield node
        elif isinstance(node, ast.If | ast.Try):
            yield from _definitions([*node.body, *node.orelse])


def _questions(symbol: _Symbol) -> Iterator[Pair]:
    name, node, summary = symbol.name, symbol.node, symbol.summary
    if isinstance(node, ast.Module):
        if summary:
            yield f"What is the module `{name}` for?", summary, True
        return
    kind = "class" if isinstance(node, ast.ClassDef) else "method" if symbol.method else "function"
    if summary:
        yield (f"What is `{name}`?" if kind == "class" else f"What does `{name}` do?"), summary, True
        yield f"Which {kind} of `{symbol.module}` fits this description: {summary}", f"`{name}`", True
    if not isinstance(node, ast.ClassDef) and summary and not _decorated(node, "property"):
        yield from _argument_questions(symbol, node)


def _argument_questions(symbol: _Symbol, node: Function) -> Iterator[Pair]:
    name, spec = symbol.name, _without_self(symbol, node)
    yield f"How is `{name}` called?", f"`{name}({ast.unparse(spec)})`", False
    defaults = _defaults(spec)
    shown = [f"`{a}`" + (f" (default `{defaults[a]}`)" if a in defaults else "") for a in _names(spec)]
    listed = " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))
    yield f"Which arguments does `{name}` take?", f"It takes {listed or 'no arguments'}.", False
    for argument, default in defaults.items():
        yield f"What is the default of `{argument}` in `{name}`?", f"The default is `{default}`.", False


def _without_self(symbol: _Symbol, node: Function) -> ast.arguments:
    spec = node.args
    if not symbol.method or _decorated(node, "staticmethod"):
        return spec
    fields: dict[str, Any] = {f: getattr(spec, f) for f in ast.arguments._fields}
    first = "posonlyargs" if spec.posonlyargs else "args"
    return ast.arguments(**{**fields, first: fields[first][1:]})


def _decorated(node: Function, name: str) -> bool:
    """Whether a decorator is `name`, `….name` or `name.setter` and the like."""
    texts = [ast.unparse(d).split("(")[0] for d in node.decorator_list]
    return any(name in t for t in texts) or any(t.endswith((".setter", ".getter", ".deleter")) for t in texts)


def _names(spec: ast.arguments) -> list[str]:
    names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
    names += [f"*{spec.vararg.arg}"] if spec.vararg else []
    names += [a.arg for a in spec.kwonlyargs]
    return names + ([f"**{spec.kwarg.arg}"] if spec.kwarg else [])


def _defaults(spec: ast.arguments) -> dict[str, str]:
    positional = [*spec.posonlyargs, *spec.args]
    pairs = list(zip(positional[len(positional) - len(spec.defaults) :], spec.defaults))
    pairs += [(a, d) for a, d in zip(spec.kwonlyargs, spec.kw_defaults) if d is not None]
    return {argument.arg: ast.unparse(default) for argument, default in pairs}
