# SPDX-License-Identifier: Apache-2.0
"""Classes of the strategies stay small, and what they hold is there when they are made.

What is counted: the attributes that a class assigns to `self`, and the parameters of its `__init__`
without `self`. The fields of a dataclass count as both, unless it is frozen: that is a value, whose
fields are data and not what the class works with.
"""

import ast
from pathlib import Path

STRATEGIES = Path(__file__).resolve().parents[2] / "megatron_moevement" / "strategies"
MAX_ATTRIBUTES, MAX_PARAMETERS, MAX_ASSERTIONS = 12, 7, 3


def nodes():
    """Yields all syntax nodes of the strategies."""
    for file in sorted(STRATEGIES.rglob("*.py")):
        yield from ast.walk(ast.parse(file.read_text(encoding="utf-8")))


def dataclass_fields(node):
    """Returns the fields of a dataclass that is not frozen."""
    decorators = [ast.unparse(each) for each in node.decorator_list]
    kinds = [text for text in decorators if "dataclass" in text]
    if not kinds or "frozen=True" in kinds[0]:
        return set()
    return {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}


def attributes(node):
    """Returns the names of what the methods of a class assign to `self`, and of its fields."""
    assigned = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and ast.unparse(each.value) == "self"
    }
    return assigned | dataclass_fields(node)


def parameters(node):
    """Returns the names of the parameters of a class's constructor."""
    names = dataclass_fields(node)
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            given = each.args
            names |= {one.arg for one in given.posonlyargs + given.args + given.kwonlyargs}
    return names - {"self"}


def is_too_large(node):
    return len(attributes(node)) > MAX_ATTRIBUTES or len(parameters(node)) > MAX_PARAMETERS


def narrows_to_something(node):
    """Returns whether a node is `assert ... is not None`."""
    return isinstance(node, ast.Assert) and "is not None" in ast.unparse(node.test)


def test_no_class_of_the_strategies_is_too_large():
    classes = [node for node in nodes() if isinstance(node, ast.ClassDef)]
    assert {node.name for node in classes if is_too_large(node)} == set()


def test_few_assertions_say_that_something_is_there():
    assert sum(map(narrows_to_something, nodes())) <= MAX_ASSERTIONS


def test_both_kinds_of_classes_are_counted():
    code = """
class Behaviour:
    def __init__(self, a, *, b):
        self.a, self.c = a, b
        self.d: int = b
        self.a += 1

@dataclasses.dataclass
class Mutable:
    a: int
    b: int = 0

@dataclasses.dataclass(frozen=True)
class Value:
    a: int
"""
    behaviour, mutable, value = ast.parse(code).body
    assert (attributes(behaviour), parameters(behaviour)) == ({"a", "c", "d"}, {"a", "b"})
    assert (attributes(mutable), parameters(mutable)) == ({"a", "b"}, {"a", "b"})
    assert (attributes(value), parameters(value)) == (set(), set())
