"""Runs the Python of a page: each value and each print must be what the comment behind it says.

store.add("epoch", 1)     # 1; an atomic counter       the value, up to a semicolon, where it is a literal
print(error.missing)      # ('rank3/ready',)           the text that is printed; ... stands for anything
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
from typing import Any

from tests.docs.blocks import Block, like

__all__ = ["run_block"]

COMMENT = re.compile(r"#\s*(.*)$")


def run_block(block: Block, names: dict[str, Any]) -> None:
    """Run a block in a namespace; raise AssertionError where a comment is not true."""
    where = f"{block.page}:{block.line}"
    lines = block.text.splitlines()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for statement in ast.parse(block.text, where).body:
            said = COMMENT.search(lines[(statement.end_lineno or 1) - 1])
            if isinstance(statement, ast.Expr) and said and _is_value(said[1]) and not _prints(statement):
                value = eval(compile(ast.Expression(statement.value), where, "eval"), names)
                assert value == ast.literal_eval(said[1].partition(";")[0]), f"{where}: {ast.unparse(statement)}"
            else:
                exec(compile(ast.Module([statement], []), where, "exec"), names)
    shown = [said for line in lines for said in re.findall(r"^\s*print\(.*?\) +# (.*)", line)]
    told = printed.getvalue().splitlines()
    if shown:
        assert len(told) == len(shown) and all(map(like, shown, told)), f"{where} printed {told}"


def _prints(statement: ast.Expr) -> bool:
    return isinstance(statement.value, ast.Call) and ast.unparse(statement.value.func) == "print"


def _is_value(text: str) -> bool:
    try:
        ast.literal_eval(text.partition(";")[0])
    except (ValueError, SyntaxError):
        return False
    return True
