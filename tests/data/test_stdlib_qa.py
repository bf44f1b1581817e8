"""The shipped instruction set: what is asked about a module, and that it is deterministic, short and leak-free."""

import sysconfig
from pathlib import Path

import pytest

from qdeepseek.data.corpus import Document, part_of
from qdeepseek.data.split import PARTS, normalise
from qdeepseek.data.stdlib_qa import LIMITS, first_sentence, instruction_rows, rows_from_documents

SOURCE = '''
"""Shapes and their areas, in metres."""
import os

def area(width, height=1.5, /, *rest, unit="m", strict, **extra):
    """Return the area of a rectangle.  More text.

    A second paragraph.
    """

def _hidden(x):
    """Return what nobody should see."""

if os.name == "nt":
    def only_here():
        """Return what one platform has only."""

class Shape:
    """A closed curve in the plane, i.e. a figure with an inside. And more."""
    def scale(self, factor: float = 2):
        """Scale the shape in place
        by a factor"""
    @staticmethod
    def unit(size):
        """Make a shape of the given size."""
    @property
    def edges(self):
        """The number of edges of the shape."""
    def copied(self):
        """Return the area of a rectangle."""
    def undocumented(self, x): ...
'''


def ask(source=SOURCE, path="shapes/__init__.py", part="train"):
    return {
        r.messages[0]["content"]: r.messages[1]["content"] for r in rows_from_documents([Document(path, source, part)])
    }


def test_questions_and_answers_about_a_module():
    assert ask() == {
        "What is the module `shapes` for?": "Shapes and their areas, in metres.",
        "What does `shapes.area` do?": "Return the area of a rectangle.",
        "Which function of `shapes` fits this description: Return the area of a rectangle.": "`shapes.area`",
        "How is `shapes.area` called?": "`shapes.area(width, height=1.5, /, *rest, unit='m', strict, **extra)`",
        "Which arguments does `shapes.area` take?":
            "It takes `width`, `height` (default `1.5`), `*rest`, `unit` (default `'m'`), `strict` and `**extra`.",
        "What is the default of `height` in `shapes.area`?": "The default is `1.5`.",
        "What is the default of `unit` in `shapes.area`?": "The default is `'m'`.",
        "What does `shapes.only_here` do?": "Return what one platform has only.",
        "Which function of `shapes` fits this description: Return what one platform has only.": "`shapes.only_here`",
        "How is `shapes.only_here` called?": "`shapes.only_here()`",
        "Which arguments does `shapes.only_here` take?": "It takes no arguments.",
        "What is `shapes.Shape`?": "A closed curve in the plane, i.e. a figure with an inside.",
        "Which class of `shapes` fits this description: A closed curve in the plane, i.e. a figure with an inside.":
            "`shapes.Shape`",
        "What does `shapes.Shape.scale` do?": "Scale the shape in place by a factor.",
        "Which method of `shapes` fits this description: Scale the shape in place by a factor.": "`shapes.Shape.scale`",
        "How is `shapes.Shape.scale` called?": "`shapes.Shape.scale(factor: float=2)`",
        "Which arguments does `shapes.Shape.scale` take?": "It takes `factor` (default `2`).",
        "What is the default of `factor` in `shapes.Shape.scale`?": "The default is `2`.",
        "What does `shapes.Shape.unit` do?": "Make a shape of the given size.",
        "Which method of `shapes` fits this description: Make a shape of the given size.": "`shapes.Shape.unit`",
        "How is `shapes.Shape.unit` called?": "`shapes.Shape.unit(size)`",
        "Which arguments does `shapes.Shape.unit` take?": "It takes `size`.",
        "What does `shapes.Shape.edges` do?": "The number of edges of the shape.",
        "Which method of `shapes` fits this description: The number of edges of the shape.": "`shapes.Shape.edges`",
        # its docstring is already the answer about `area`
        "How is `shapes.Shape.copied` called?": "`shapes.Shape.copied()`",
        "Which arguments does `shapes.Shape.copied` take?": "It takes no arguments.",
    }  # fmt: skip


def test_names_follow_the_import_path():
    assert "What is the module `os.path` for?" in ask(path="posixpath.py")
    assert "What does `a.b.area` do?" in ask(path="a/b.py")
    for path in ("_private.py", "a/_b.py", "idlelib/x.py", "not-a-name/x.py"):
        assert ask(path=path) == {}
    assert ask("def broken(:") == {}


@pytest.mark.parametrize(
    "docstring, sentence",
    [
        ("Return it all. Then y.", "Return it all."), ("Use e.g. this one", "Use e.g. this one."), ("", None),
        ("Too short", None),
        ("copy(x) -> a copy of x", None), (">>> print(1) is shown here", None), ("The options are these:", None),
        ("Does version 1.5 of this?", "Does version 1.5 of this?"),
    ],
)  # fmt: skip
def test_first_sentence(docstring, sentence):
    assert first_sentence(docstring) == sentence


def test_a_docstring_shared_by_two_files_stays_in_train():
    documents = [Document("b.py", SOURCE, "report"), Document("a.py", SOURCE, "train")]
    rows = rows_from_documents(documents)
    quoted = {r.messages[1]["content"] for r in rows if r.part == "report"}
    assert rows[0].part == "train" and "Return the area of a rectangle." not in quoted


def test_real_functions_have_the_documented_answers():
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = [Document(p, (root / p).read_text(), part_of(p)) for p in ("textwrap.py", "posixpath.py")]
    answers = {r.messages[0]["content"]: r.messages[1]["content"] for r in rows_from_documents(documents)}
    assert "whitespace" in answers["What does `textwrap.dedent` do?"]
    assert answers["Which arguments does `os.path.join` take?"] == "It takes `a` and `*p`."


def test_rows_do_not_depend_on_the_order_of_files_and_limits_choose_by_hash():
    documents = [Document(f"m{i}.py", SOURCE.replace("shape", f"shape{i}"), part_of(f"m{i}.py")) for i in range(30)]
    rows = rows_from_documents(documents)
    assert rows == rows_from_documents(documents[::-1])
    few = rows_from_documents(documents, {"train": 20, "select": 0, "report": 1})
    assert len(few) == 21 and all(row in rows for row in few)
    assert len({row.where.split(":")[0] for row in few}) > 5


@pytest.mark.slow
def test_whole_set_is_short_and_leak_free(byte_chat_tokenizer):
    rows = instruction_rows()
    counts = {part: sum(r.part == part for r in rows) for part in PARTS}
    assert counts["train"] == LIMITS["train"] and counts["select"] >= 100 and counts["report"] >= 100, counts
    questions = [normalise(r.messages[0]["content"]) for r in rows]
    assert len(set(questions)) == len(rows)
    train = {normalise(r.messages[1]["content"]) for r in rows if r.part == "train"}
    quoting = ("What does ", "What is the module")
    held_out = [r for r in rows if r.part != "train" and r.messages[0]["content"].startswith(quoting)]
    assert held_out and not [r for r in held_out if normalise(r.messages[1]["content"]) in train]
    longest = max(rows, key=lambda r: len(str(r.messages).encode()))
    assert len(byte_chat_tokenizer.apply_chat_template(list(longest.messages))["input_ids"]) <= 512
