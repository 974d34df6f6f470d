# SPDX-License-Identifier: Apache-2.0
"""What policy/ decides is what production runs: every public name there has a use in production.

Production is the package without `testing/`. A name is used where production outside of policy/
names it, or a part of policy/ does that is itself used. The analysis goes by names, not by values:

- A function or class counts only where it is imported from, or reached through, its own module;
  an enum member only as an attribute of its class, or where the class itself is called, passed on
  or iterated over, which may come to any member.
- A method or property counts wherever any attribute has its name, whosever it is. A dead `steps`
  is not noticed as long as another class has a `steps` that is used. The methods of a class come
  alive with the class where their names begin with an underscore.
- Who names something need not do so in any run: a branch that nothing reaches keeps alive what it
  names, and so does a comparison with an enum member that nobody assigns.
"""

import ast
import dataclasses
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_moevement"
POLICY = "megatron_moevement.policy"


@dataclasses.dataclass(frozen=True)
class Part:
    """A definition, or what a module does beside its definitions.

    Attributes:
        module: dotted name.
        owner: class of a method or an enum member; empty for anything else.
        name: of the definition; empty for the rest of a module.
        is_member: whether it is a member of an enum.
        names: what it names: pairs of what stands before the dot and after it; `*` after the dot
            where all members of a class may be meant.
    """

    module: str
    owner: str
    name: str
    is_member: bool
    names: frozenset

    @property
    def is_public(self):
        return bool(self.name) and not any(n.startswith("_") for n in (self.owner, self.name) if n)

    def __str__(self):
        return ".".join(part for part in (self.module, self.owner, self.name) if part)


def imports_of(tree):
    """Returns for each name that a module imports the dotted name of what it stands for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
        elif isinstance(node, ast.Import):
            found.update({a.asname or a.name: a.name for a in node.names})
    return found


def names_in(module, imports, local, nodes):
    """Returns what nodes name, the names of other modules resolved."""

    def resolved(name):
        return imports.get(name, f"{module}.{name}" if name in local else name)

    found = set()
    for node in nodes:
        for each in ast.walk(node):
            found.update((resolved(name), "*") for name in taken_whole(each))
            if isinstance(each, ast.Name):
                found.add(("", resolved(each.id)))
            elif isinstance(each, ast.Call) and getattr(each.func, "id", "") == "methodcaller":
                found.add(("", each.args[0].value))
            elif isinstance(each, ast.Attribute):
                value = each.value
                before = ""
                if isinstance(value, ast.Name):
                    before = resolved(value.id)
                elif isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
                    before = f"{resolved(value.value.id)}.{value.attr}"
                found.add((before, each.attr))
    return frozenset(found)


def taken_whole(node):
    """Returns the names that a node calls, passes on or iterates over."""
    if isinstance(node, ast.Call):
        nodes = [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, ast.For | ast.comprehension):
        nodes = [node.iter]
    else:
        nodes = []
    return [each.id for each in nodes if isinstance(each, ast.Name)]


def is_enum(node):
    return any(ast.unparse(base).endswith("Enum") for base in node.bases)


def parts_of(module, source):
    """Returns the parts of a module, its definitions apart from each other."""
    tree = ast.parse(source)
    imports = imports_of(tree)
    local = {name for node in tree.body for name in defined_by(node)}

    def part(owner, name, nodes, is_member=False):
        return Part(module, owner, name, is_member, names_in(module, imports, local, nodes))

    parts, rest = [], []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            own = [*node.decorator_list, *node.bases]
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
                    parts.append(part(node.name, each.name, [each]))
                elif is_enum(node) and isinstance(each, ast.Assign):
                    parts.append(part(node.name, each.targets[0].id, [each.value], is_member=True))
                else:
                    own.append(each)
            parts.append(part("", node.name, own))
        elif defined_by(node):
            parts.extend(part("", name, [node]) for name in defined_by(node))
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            rest.append(node)
    return [*parts, part("", "", rest)]


def defined_by(node):
    """Returns the names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def is_named(part, names):
    """Returns whether a part is among names."""
    if not part.owner:
        return ("", f"{part.module}.{part.name}") in names or (part.module, part.name) in names
    if part.is_member:
        owner = f"{part.module}.{part.owner}"
        return (owner, part.name) in names or (owner, "*") in names
    return any(after == part.name for _, after in names)


def unused(parts, decides):
    """Returns the public parts of the deciding modules that nothing outside of them leads to."""
    names = {name for part in parts if not decides(part.module) for name in part.names}
    pending = [part for part in parts if decides(part.module)]
    names.update(name for part in pending if not part.name for name in part.names)
    while True:
        reached = [part for part in pending if is_named(part, names)]
        if not reached:
            return sorted(str(part) for part in pending if part.is_public)
        pending = [part for part in pending if part not in reached]
        names.update(name for part in reached for name in part.names)


def production():
    """Yields module and source of everything that production consists of."""
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        if ".testing." not in f"{module}.":
            yield module, file.read_text(encoding="utf-8")
    yield "pretrain_moe", (ROOT / "pretrain_moe.py").read_text(encoding="utf-8")


DECIDES = """
import dataclasses
from enum import Enum
class Kind(Enum):
    ONE = 1
    TWO = 2
class Whole(Enum):
    THREE = 3
@dataclasses.dataclass
class Value:
    size: int
    def grow(self): return inner()
    def shrink(self): return dead()
    def _own(self): return private()
def inner(): return Kind.ONE
def dead(): return Kind.TWO
def private(): return 1
def used(value: Value): return LIMIT
def itself(): return itself()
LIMIT = 1
UNUSED = 2
"""

RUNS = """
from decides import Whole, used
used(None).grow(list(Whole))
"""


def test_the_check_finds_what_nothing_leads_to():
    parts = [*parts_of("decides", DECIDES), *parts_of("runs", RUNS)]
    assert unused(parts, lambda module: module == "decides") == [
        "decides.Kind.TWO",
        "decides.UNUSED",
        "decides.Value.shrink",
        "decides.dead",
        "decides.itself",
    ]


def test_production_runs_every_decision():
    parts = [part for module, source in production() for part in parts_of(module, source)]
    assert len([part for part in parts if part.module.startswith(POLICY)]) > 500
    assert unused(parts, lambda module: module.startswith(POLICY)) == []
