"""Print tinygrad's tables of tensor core fragments, as its emulation of CUDA has them.

    python3 tinygrad_fragments.py PATH-OF-tinygrad/runtime/ops_python.py

Of each shape (rows, columns and inner size of mma) and matrix, a line for each element: INNER MATRIX ROW COLUMN LANE ELEMENT. The
functions are nested in tinygrad's interpreter, so they are cut out of its source and run here. Needs the standard library alone.
"""

import ast
import sys

LANES, ROWS, COLUMNS = 32, 16, 8


class Fragments:
    """What tinygrad indexes as [element][lane]: says which it was."""

    def __init__(self, place=()):
        self.place = place

    def __getitem__(self, index):
        return Fragments((*self.place, index))


def functions(body, names):
    """The functions of these names that a block of statements defines."""
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert len(found) == len(names), f"tinygrad has no longer {names} here"
    scope = {}
    exec(compile(ast.Module(body=found, type_ignores=[]), "tinygrad", "exec"), scope)
    return [scope[name] for name in names]


def branch(tree, condition):
    """The block that runs under a condition, given as its source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == condition:
            return node.body
    raise SystemExit(f"tinygrad has no longer a branch for {condition}")


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        tree = ast.parse(file.read())
    of_cuda = branch(tree, "device == 'CUDA'")
    (c_map,) = functions(of_cuda, ["c_map"])
    in_cuda = ast.Module(body=of_cuda, type_ignores=[])
    conditions = {16: "dims == (8, 16, 16)", 8: "dims == (8, 16, 8) and dtype_in == dtypes.half"}
    for inner, condition in conditions.items():
        a_elem, b_elem = functions(branch(in_cuda, condition), ["a_elem", "b_elem"])
        for k in range(inner):
            for row in range(ROWS):
                element, lane = a_elem(Fragments(), k, row, 0).place
                print(inner, "a", row, k, lane, element)
            for column in range(COLUMNS):
                element, lane = b_elem(Fragments(), column, k, 0).place
                print(inner, "b", k, column, lane, element)
        for lane in range(LANES):
            for element in range(ROWS * COLUMNS // LANES):
                column, row = c_map(lane, element)
                print(inner, "sum", row, column, lane, element)


main()
