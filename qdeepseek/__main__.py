"""`python -m qdeepseek …` is `qdeepseek …`, where only the interpreter is known, as in a batch script."""

from qdeepseek.cli import app

app(prog_name="qdeepseek")
