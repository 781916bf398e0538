"""Changes of Python code that mutmut does not make: an operand or a step left
out, a name exchanged for one of the same type, a copy not taken.

`OURS` has the form of mutmut's table of operators: a type of libcst's nodes,
and what gives other nodes for one.
"""

from collections import defaultdict
from collections.abc import Iterator

import libcst as cst
import libcst.matchers as m

# Methods without arguments, and functions of one, that give what they are given
# once more: as a copy, cut off from the graph, in another type or layout.
COPIES = """clone copy detach contiguous double float upcast deepcopy list dict
    """.split()

_exchanged: dict[cst.CSTNode, list[cst.BaseExpression]] = {}


def code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def operand_left_out(
    node: cst.BooleanOperation | cst.BinaryOperation,
) -> Iterator[cst.BaseExpression]:
    "`a and b`, `a & b`, `a + b` → `a`, `b`; texts are left alone."
    text = m.SimpleString() | m.FormattedString() | m.ConcatenatedString()
    if not any(m.matches(side, text) for side in (node.left, node.right)):
        yield from (node.left, node.right)


def copy_not_taken(node: cst.Call) -> Iterator[cst.BaseExpression]:
    "`x.clone()` → `x`, `list(x)` → `x`."
    if m.matches(node.func, m.Attribute()) and not node.args:
        if node.func.attr.value in COPIES:
            yield node.func.value
    elif m.matches(node.func, m.Name()) and len(node.args) == 1:
        if node.func.value in COPIES and not node.args[0].star:
            yield node.args[0].value


def step_left_out(node: cst.Expr) -> Iterator[cst.Expr]:
    "A call whose result nobody takes → nothing."
    if m.matches(node.value, m.Call()):
        yield node.with_changes(value=cst.Name("None"))


class _Names(cst.CSTVisitor):
    """The names in a function and what is bound to each, in the text's order;
    which were bound side by side, or are of one annotation.
    """

    def __init__(self) -> None:
        self.read: list[tuple[cst.Name, int]] = []  # with bindings so far
        self.bound: dict[str, list[cst.BaseExpression]] = defaultdict(list)
        self.alike: dict[str, set[str]] = defaultdict(set)

    def same_type(self, names: list[str]) -> None:
        for name in names:
            self.alike[name] |= set(names) - {name}

    def leave_out(self, node: cst.CSTNode) -> bool:
        return False

    visit_Annotation = visit_Import = visit_ImportFrom = leave_out
    visit_Global = visit_Nonlocal = visit_FormattedString = leave_out

    def value_only(self, node: cst.Attribute | cst.Arg) -> bool:
        node.value.visit(self)
        return False

    visit_Attribute = visit_Arg = value_only

    def visit_Parameters(self, node: cst.Parameters) -> bool:
        types: dict[str, list[str]] = defaultdict(list)
        for param in (*node.params, *node.kwonly_params):
            if param.annotation:
                kind = code(param.annotation.annotation)
                types[kind].append(param.name.value)
        for names in types.values():
            self.same_type(names)
        return False

    def visit_Assign(self, node: cst.Assign) -> bool:
        node.value.visit(self)
        for target in (t.target for t in node.targets):
            if isinstance(target, cst.Name):
                self.bound[target.value].append(node.value)
            elif isinstance(target, cst.Tuple):
                found = [e.value for e in target.elements]
                one_call = not isinstance(node.value, cst.Tuple)
                if one_call and all(isinstance(e, cst.Name) for e in found):
                    self.same_type([e.value for e in found if e.value != "_"])
        return False

    def visit_AnnAssign(self, node: cst.AnnAssign) -> bool:
        if node.value and isinstance(node.target, cst.Name):
            node.value.visit(self)
            self.bound[node.target.value].append(node.value)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self.read.append((node, len(self.bound[node.value])))


def look_at_names(node: cst.FunctionDef) -> Iterator[cst.CSTNode]:
    "Mutmut comes here first, then to the names of this function."
    names = _Names()
    node.params.visit(names)
    node.body.visit(names)
    for name, before in names.read:
        _exchanged[name] = [
            *(cst.Name(other) for other in sorted(names.alike[name.value])),
            *names.bound[name.value][: max(before - 1, 0)],
        ]
    yield from ()


def name_exchanged(node: cst.Name) -> Iterator[cst.BaseExpression]:
    """For a name of the same annotation, for one that was bound beside it, for
    what was bound to it before: `n = a; n = b; f(n)` → `f((a))`.
    """
    yield from _exchanged.get(node, ())


OURS = [
    ((cst.BooleanOperation, cst.BinaryOperation), operand_left_out),
    (cst.Call, copy_not_taken),
    (cst.Expr, step_left_out),
    (cst.FunctionDef, look_at_names),
    (cst.Name, name_exchanged),
]
