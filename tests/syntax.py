"""Source files as syntax trees, for tests that read the code."""

import ast
from functools import cache
from pathlib import Path


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    """All nodes of a file's tree, the module first."""
    return list(ast.walk(ast.parse(file.read_text())))
