"""The architecture: which way imports run, the one door to torch's inside, and the public names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCH_HALF = ROOT / "autockpt"
SOLVER_HALF = ROOT / "solvers" / "autockpt_solvers"

# Each file of the PyTorch half may import those before it. A new file takes its place here.
ORDER = [
    "budget",
    "cache",
    "_torch.values",
    "_torch.nodes",
    "_torch.numbers",
    "_torch.refused",
    "_torch.joint",
    "_torch.engine",
    "_torch.modes",
    "_torch.generated",
    "_torch.kernels",
    "_torch.tracing",
    "_torch.failures",
    "_torch.allocator",
    "_torch",
    "pins",
    "out_of_memory",
    "tangents",
    "copies",
    "pieces",
    "device",
    "roofline",
    "weights",
    "capture",
    "profile",
    "accumulate",
    "inplace",
    "formulate",
    "replay",
    "rewrite",
    "arena",
    "allocator",
    "pool",
    "unforeseen",
    "resident",
    "given",
    "solved_before",
    "planning",
    "flights",
    "together",
    "backwards",
    "graphs",
    "eager_errors",
    "record",
    "joined",
    "parts",
    "several",
    "split",
    "losses",
    "ranks",
    "step",
    "choose",
    "planner",
    "module",
    "ahead",
    "measure",
    "per_module",
    "report",
    "picture",
    "explain",
    "frontier",
    "document",
    "cli",
    "__main__",
]
DOOR = "autockpt._torch"

PUBLIC = [
    "AutockptError",
    "BudgetError",
    "CaptureError",
    "DoubleBackward",
    "InfeasibleBudget",
    "InputError",
    "OutOfMemory",
    "PinError",
    "Plan",
    "PlanFormatError",
    "PlanMismatch",
    "ScheduleError",
    "SolverError",
    "StaleInput",
    "StepError",
    "measure",
    "optimize",
    "plan",
    "restore",
]
SOLVERS_PUBLIC = [
    "BARRIER",
    "METHODS",
    "AutockptError",
    "Barrier",
    "BudgetError",
    "CaptureError",
    "Compute",
    "Free",
    "InfeasibleBudget",
    "InputError",
    "Minimum",
    "Operation",
    "Outcome",
    "PinError",
    "PlanFormatError",
    "PlanMismatch",
    "Problem",
    "Schedule",
    "ScheduleError",
    "Solution",
    "SolverError",
    "StepError",
    "Storage",
    "Trace",
    "free_early",
    "live_storages",
    "lower_bound",
    "minimum",
    "simulate",
    "solve",
    "sweep",
]

# -------------------------------------------------------------------- reading source


def _modules(package: Path) -> dict[str, ast.Module]:
    """Return the syntax tree of every module of a package by its full name."""
    trees = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return trees


TORCH_MODULES = _modules(TORCH_HALF)
SOLVER_MODULES = _modules(SOLVER_HALF)
MODULES = TORCH_MODULES | SOLVER_MODULES


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the full name of everything a module imports, wherever in it the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _imported_modules(tree: ast.Module) -> set[str]:
    """Return the modules of this project that a module imports."""
    found = set()
    for name in _imports(tree):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        found |= {name} - {""}
    return found


def _exports(tree: ast.Module) -> list[str]:
    """Return what a module's ``__all__`` names."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise AssertionError("there is no __all__")


def _private(dotted: str) -> bool:
    """Return whether a name is inside one of torch's private modules; operators are not."""
    root, *rest = dotted.split(".")
    if root != "torch" or rest[:1] == ["ops"]:
        return False
    return any(re.match(r"_(?!_)", part) for part in rest)


def _private_uses(tree: ast.Module) -> Iterator[str]:
    """Yield the private parts of torch that a module imports, reaches through, or names."""
    known = {}  # local name -> what it stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                target = alias.name if alias.asname else alias.name.partition(".")[0]
                known[alias.asname or target] = target
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    yield from filter(_private, _imports(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            first, _, rest = dotted.partition(".")
            if re.fullmatch(r"[\w.]+", dotted) and _private(f"{known.get(first, '')}.{rest}"):
                yield dotted
        elif isinstance(node, ast.Call):
            for value in node.args:
                text = value.value if isinstance(value, ast.Constant) else ""
                if isinstance(text, str) and re.fullmatch(r"torch(\.\w+)+", text):
                    yield from filter(_private, [text])
            if ast.unparse(node.func) == "getattr" and len(node.args) >= 2:
                owner, name = ast.unparse(node.args[0]), node.args[1]
                if isinstance(name, ast.Constant):
                    first, _, rest = f"{owner}.{name.value}".partition(".")
                    yield from filter(_private, [f"{known.get(first, '')}.{rest}"])


# -------------------------------------------------------------------- the order


def test_the_order_names_every_file_once() -> None:
    files = {name.partition(".")[2] for name in TORCH_MODULES} - {""}
    assert sorted(files) == sorted(ORDER)


@pytest.mark.parametrize("name", sorted(TORCH_MODULES.keys() - {"autockpt"}))
def test_imports_of_the_torch_half_run_one_way(name: str) -> None:
    file = name.partition(".")[2]
    assert file in ORDER, f"give {file} its place in ORDER"
    place = ORDER.index(file)
    earlier = {f"autockpt.{file}" for file in ORDER[:place]}
    own = {used for used in _imported_modules(TORCH_MODULES[name]) if used in TORCH_MODULES}
    assert own <= earlier


@pytest.mark.parametrize("name", sorted(SOLVER_MODULES))
def test_the_solver_half_knows_nothing_of_torch(name: str) -> None:
    roots = {used.partition(".")[0] for used in _imports(SOLVER_MODULES[name])}
    assert not roots & {"torch", "autockpt", "transformers"}


def test_there_is_no_import_cycle() -> None:
    graph = {name: _imported_modules(tree) - {name} for name, tree in MODULES.items()}
    # A package runs before its modules; what it imports of them is no cycle by itself.
    packages = {name for name in MODULES if any(n.startswith(f"{name}.") for n in MODULES)}
    inner = {name: used - packages for name, used in graph.items() if name not in packages}
    assert len(list(TopologicalSorter(inner).static_order())) >= len(inner)


def test_importing_the_solver_half_leaves_torch_out() -> None:
    code = (
        "import pkgutil, sys, autockpt_solvers as package\n"
        "for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    __import__(module.name)\n"
        "print('torch' in sys.modules, 'autockpt' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_what_is_imported_is_what_is_declared() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    plot = project["optional-dependencies"]["plot"]
    declared = {re.match(r"[\w-]+", item)[0] for item in [*project["dependencies"], *plot]}
    imported = {name.partition(".")[0] for tree in MODULES.values() for name in _imports(tree)}
    own = {"autockpt", "autockpt_solvers"}
    assert imported - own - sys.stdlib_module_names == declared


# -------------------------------------------------------------------- the door


def _is_the_door(name: str) -> bool:
    return name == DOOR or name.startswith(f"{DOOR}.")


@pytest.mark.parametrize("name", [n for n in sorted(TORCH_MODULES) if not _is_the_door(n)])
def test_nobody_goes_past_the_door(name: str) -> None:
    inner = {used for used in _imports(TORCH_MODULES[name]) if used.startswith(f"{DOOR}.")}
    known = {f"{DOOR}.{exported}" for exported in _exports(TORCH_MODULES[DOOR])}
    assert inner <= known


@pytest.mark.parametrize("name", [n for n in sorted(TORCH_MODULES) if not _is_the_door(n)])
def test_only_the_door_uses_torchs_private_modules(name: str) -> None:
    assert sorted(set(_private_uses(TORCH_MODULES[name]))) == []


@pytest.mark.parametrize(
    ("source", "private"),
    [
        ("import torch._dynamo", True),
        ("import torch._functorch.config as config", True),
        ("from torch import _C", True),
        ("from torch._subclasses import FakeTensorMode", True),
        ("from torch.fx.graph import _BoxedCodeGen", True),
        ("from torch.utils import _pytree as pytree", True),
        ("def f():\n    from torch._inductor import config", True),
        ("import torch\ntorch._dynamo.reset()", True),
        ("import torch as t\nt._C._cuda_init()", True),
        ("from torch import fx\nfx.graph._BoxedCodeGen", True),
        ("import torch\ngetattr(torch, '_C')", True),
        ("import importlib\nimportlib.import_module('torch._dynamo')", True),
        ("import torch\ntorch.__version__", False),
        ("import torch\ntorch.ops.aten._softmax.default", False),
        ("from torch import nn\nclass M(nn.Module): pass\nM()._x", False),
        ("from autockpt import _torch\n_torch.capture", False),
        ("'''torch._dynamo is used through the door'''", False),
    ],
)
def test_the_search_for_private_uses_finds_them(source: str, private: bool) -> None:
    assert bool(list(_private_uses(ast.parse(source)))) is private


# -------------------------------------------------------------------- the names


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_module_says_what_it_exports(name: str) -> None:
    stated, defined = None, set()
    for node in MODULES[name].body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {
                n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)
            }
            if names == {"__all__"}:
                assert node.value is not None
                stated = ast.literal_eval(node.value)
            defined |= names
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {alias.asname or alias.name for alias in node.names}
    assert stated is not None, "there is no __all__"
    assert len(stated) == len(set(stated))
    assert set(stated) <= defined


def test_the_exported_names_are_these() -> None:
    import autockpt
    import autockpt_solvers

    assert sorted(autockpt.__all__) == sorted(PUBLIC)
    assert all(hasattr(autockpt, name) for name in PUBLIC)
    assert sorted(autockpt_solvers.__all__) == sorted(SOLVERS_PUBLIC)
    assert all(hasattr(autockpt_solvers, name) for name in SOLVERS_PUBLIC)
