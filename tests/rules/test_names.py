"""Operations of torch are named where their facts are: in rules/, and in graph/, which writes them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import varprop

SOURCE = Path(varprop.__file__).parent
# what still compares operations rather than facts of their rules; this list only becomes shorter
REMAINING = {"predict/adjoint.py", "predict/attention.py", "predict/draws.py", "predict/windows.py"}


def operations_named(tree: ast.Module) -> Iterator[str]:
    """Attributes of ``aten`` or ``torch.ops.aten``, and strings that are nothing but the name of an operation."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            holder = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if holder == "aten":  # also as torch.ops.aten
                yield ast.unparse(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.match(r"aten\.\w", node.value):
            yield node.value


def test_operations_are_named_in_rules_and_graph_alone() -> None:
    files = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    naming = {name: list(operations_named(ast.parse(text))) for name, text in files.items() if "aten" in text}
    outside = {name: ops for name, ops in naming.items() if ops and name.split("/")[0] not in ("rules", "graph")}
    assert not {name: ops for name, ops in outside.items() if name not in REMAINING}
    assert len(naming["rules/elementwise.py"]) > 50
