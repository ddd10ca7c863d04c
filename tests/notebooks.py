"""Runs the cells of a notebook in a plain Python process, and keeps what they show: `python -m tests.notebooks NOTEBOOK OUT`.

It stands for Jupyter, which is no part of the environment: the cells run one after the other in one namespace, and each has its
printed text, the value of its last line (unless that ends with a semicolon), and its open figures as outputs. OUT is the
notebook with these outputs.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """Returns the notebook with the outputs of its cells. Raises what a cell raises."""
    space: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            cell |= {"execution_count": number, "outputs": outputs("".join(cell["source"]), space, number)}
    return notebook


def outputs(source: str, space: dict[str, Any], number: int) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    is_shown = bool(tree.body) and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";")
    last = tree.body.pop() if is_shown else None
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, f"cell {number}", "exec"), space)
        value = None if last is None else eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), space)
    found: list[dict[str, Any]] = []
    # Where it ran is no matter of who reads it.
    if text := printed.getvalue().replace(os.getcwd(), "~/first_steps"):
        found.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        found.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data})
    return found + [{"output_type": "display_data", "metadata": {}, "data": {"image/png": one}} for one in figures()]


def figures() -> list[str]:
    """Returns the open figures as PNG in base64, and closes them."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    found = []
    for number in pyplot.get_fignums():
        file = io.BytesIO()
        pyplot.figure(number).savefig(file, format="png", dpi=72, bbox_inches="tight")
        found.append(base64.b64encode(file.getvalue()).decode())
    pyplot.close("all")
    return found


def main() -> None:
    notebook, out = sys.argv[1:]
    sys.path.insert(0, "")  # as a notebook has it: the folder it runs in
    made = executed(json.loads(Path(notebook).read_text()))
    Path(out).write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
