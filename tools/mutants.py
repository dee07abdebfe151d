"""Run mutation tests of the formulas: put small faults into a module, one at a time, and run its tests on each.

    python tools/mutants.py [equations losses metrics labels] [--jobs 1] [--out survivors.txt] [--again survivors.txt]

Nothing on disk is changed. Within one pytest session, which has collected the tests, a fork puts the changed code into
the module in memory. It runs the tests that reach the changed line, the fastest first, until one fails. A mutant that
no test notices is printed with the function that it is in. Not mutated: annotations, docstrings, texts of errors, and
`device=`, because tests run on a CPU.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import hypothesis.errors
import pytest

ROOT = Path(__file__).parent.parent
MODULES = {"equations": "bias", "losses": "methods", "metrics": "evaluation", "labels": "log"}  # name -> package
FORK = get_context("fork")
NOTICED, UNNOTICED = 3, 4  # exit codes of a fork; any other is a crash

# --- Mutants ------------------------------------------------------------------------------------------------------

OTHER_OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Pow: (ast.Mult,),
}
for one, other in (
    *((ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot), (ast.Add, ast.Sub)),
    *((ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr), (ast.And, ast.Or)),
):
    OTHER_OPERATORS |= {one: (other,), other: (one,)}
SYMMETRIC = {"min", "max", "minimum", "maximum", "logaddexp", "isinstance"}  # swapped, isinstance always fails
LIBRARIES = {"torch", "np", "ast", "operator", "sys", "self"}


@dataclass(frozen=True)
class Mutant:
    """A node of a module's syntax tree, its number among all nodes, and its replacement."""

    place: int
    function: str  # the qualified name of the function it is in, or "module"
    lines: range
    before: str
    changed: ast.AST

    @property
    def after(self) -> str:
        return ast.unparse(self.changed)

    def __str__(self) -> str:
        return f"{self.function}: {self.before}  ->  {self.after}".replace("\n", " ")


def mutants_of(tree: ast.Module) -> list[Mutant]:
    excluded = _excluded(tree)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    mutants = []
    for place, node in enumerate(ast.walk(tree)):
        if id(node) not in excluded:
            before = ast.unparse(node)
            lines = _statement(node, parents)
            function = _function(node, parents)
            mutants += [Mutant(place, function, lines, before, changed) for changed in _changes(node)]
    return sorted((m for m in mutants if m.before != m.after), key=lambda mutant: mutant.lines.start)


def put_in_place(tree: ast.Module, mutant: Mutant) -> None:
    old = next(node for place, node in enumerate(ast.walk(tree)) if place == mutant.place)
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, mutant.changed)
            elif isinstance(value, list):
                value[:] = [mutant.changed if part is old else part for part in value]
    ast.fix_missing_locations(tree)


def _statement(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> range:
    """Return the lines of the statement that a node is in."""
    while not isinstance(node, ast.stmt) and node in parents:
        node = parents[node]
    first = getattr(node, "lineno", 0)
    return range(first, getattr(node, "end_lineno", first) + 1)


def _function(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    """Return the qualified name of the function that a node is in."""
    names = []
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
    return ".".join(reversed(names)) or "module"


def _excluded(tree: ast.AST) -> set[int]:
    """Return the ids of nodes that are not mutated."""
    excluded: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        match node:
            case ast.arg(annotation=annotation) | ast.AnnAssign(annotation=annotation):
                parts.append(annotation)
            case ast.Expr(value=ast.Constant()) | ast.keyword(arg="device") | ast.JoinedStr():
                parts.append(node)
            case ast.FunctionDef(returns=returns, decorator_list=decorators):
                parts += [returns, *decorators]
            case ast.ClassDef(decorator_list=decorators):
                parts += decorators
            case ast.Assign(value=ast.Subscript(value=ast.Name(id="Callable" | "Literal"))):
                parts.append(node)
            case ast.Raise(exc=ast.AST() as error):
                parts.append(error)
        excluded.update(id(inner) for part in parts if part is not None for inner in ast.walk(part))
    return excluded


def _altered(node: ast.AST, **fields: object) -> Any:
    copy = deepcopy(node)
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


def _swapped(parts: Sequence[ast.AST], i: int) -> list[ast.AST]:
    return [*parts[:i], parts[i + 1], parts[i], *parts[i + 2 :]]


def _changes(node: ast.AST) -> Iterator[ast.AST]:  # noqa: C901  # one case for each kind of node
    match node:
        case ast.Compare(ops=[operator]) | ast.BinOp(op=operator) | ast.BoolOp(op=operator):
            for other in OTHER_OPERATORS.get(type(operator), ()):
                yield _altered(node, **({"ops": [other()]} if isinstance(node, ast.Compare) else {"op": other()}))
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.Constant(value=bool() as truth):
            yield ast.Constant(not truth)
        case ast.Constant(value=int() | float() as number):
            yield ast.Constant(number + 1)
        case ast.Constant(value=str() as text):
            yield ast.Constant(text + "~")
        case ast.IfExp(body=body, orelse=orelse):
            yield body
            yield orelse
        case ast.If(test=test):
            yield _altered(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.comprehension(ifs=[_, *_]):
            yield _altered(node, ifs=[])
        case ast.Return(value=ast.AST()):
            yield ast.Return(ast.Constant(None))
        case ast.Raise():
            yield ast.Pass()
        case ast.Assign(targets=[target], value=value) if _names(target) & _names(value):
            yield ast.Pass()
        case ast.Tuple(elts=[ast.Constant(), _, _] as parts):  # x[..., :, None]
            yield _altered(node, elts=_swapped(parts, 1))
        case ast.Tuple(elts=[_, _, *_] as parts, ctx=ast.Load()):
            of_classes = all(ast.unparse(part).rpartition(".")[2][:1].isupper() for part in parts)
            if not of_classes:  # the order of classes has no effect
                yield from (_altered(node, elts=_swapped(parts, i)) for i in range(len(parts) - 1))
            if of_classes or len(parts) > 2:
                yield from (_altered(node, elts=[*parts[:i], *parts[i + 1 :]]) for i in range(len(parts)))
        case ast.MatchOr(patterns=parts) if len(parts) > 2:
            yield from (_altered(node, patterns=[*parts[:i], *parts[i + 1 :]]) for i in range(len(parts)))
        case ast.match_case(guard=ast.AST()):
            yield _altered(node, guard=None)
        case ast.Dict(keys=keys, values=values):
            yield from (_altered(node, values=_swapped(values, i)) for i in range(len(keys) - 1))
        case ast.Slice(lower=lower, upper=upper) if lower or upper:
            yield ast.Slice()
        case ast.Call():
            yield from _changed_calls(node)


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _changed_calls(call: ast.Call) -> Iterator[ast.AST]:
    """Yield the call replaced by its object or an argument, with arguments swapped, and without each keyword."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    skipped = 1 if name == "where" else 0  # the condition is not swapped with a value
    if isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") not in LIBRARIES:
        yield call.func.value
    else:
        yield from (arg for arg in call.args[skipped : 2 * skipped + 1] if not isinstance(arg, ast.Starred))
    if name not in SYMMETRIC:
        yield from (_altered(call, args=_swapped(call.args, i)) for i in range(skipped, len(call.args) - 1))
    for keyword in call.keywords:
        if keyword.arg != "device":
            yield _altered(call, keywords=[other for other in call.keywords if other is not keyword])


# --- Runs ---------------------------------------------------------------------------------------------------------

Seen = dict[str, tuple[float, set[int]]]  # for each test: its seconds, and the lines of the module that it reaches


def put_into(module: ModuleType, code: CodeType) -> None:
    """Run the code of a module again, and update the functions and classes that others have imported from it."""
    before = dict(vars(module))
    exec(code, vars(module))
    for name, old in before.items():
        new = vars(module)[name]
        if isinstance(old, FunctionType) and old.__module__ == module.__name__:
            inner, changed = inspect.unwrap(old), inspect.unwrap(new)
            for part in ("__code__", "__defaults__", "__kwdefaults__"):
                setattr(inner, part, getattr(changed, part))
        elif isinstance(old, type) and old.__module__ == module.__name__:
            for field, value in vars(new).items():
                if field not in ("__dict__", "__weakref__"):
                    setattr(old, field, value)
        elif isinstance(old, dict) and not name.startswith("__"):
            old.clear()
            old.update(new)
        else:
            continue
        setattr(module, name, old)


class Bench:
    """A pytest plug-in that runs tests in forks instead of pytest's own loop."""

    def __init__(self, modules: Sequence[str], again: Sequence[str] | None, jobs: int) -> None:
        self.modules, self.again, self.jobs = modules, again, jobs
        self.survivors: list[str] = []
        self.table: list[str] = []
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for test in {item.obj for item in session.items if isinstance(item, pytest.Function)}:
            if handle := getattr(test, "hypothesis", None):
                handle.inner_test = ending_at_once(handle.inner_test)
        for name in self.modules:
            items = [item for item in session.items if item.path.name == f"test_{name}.py"]
            self.try_module(importlib.import_module(f"ultr.{MODULES[name]}.{name}"), items)
        return True

    def passes(self, item: pytest.Item) -> bool:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return not self.failed

    def try_module(self, module: ModuleType, items: list[pytest.Item]) -> None:
        path = Path(str(module.__file__))
        tree = ast.parse(path.read_text())
        mutants = [m for m in mutants_of(tree) if self.again is None or f"{path.stem}.{m}" in self.again]
        seen = self.watch(path, items)
        unchanged = Mutant(0, "module", range(0), "", tree)
        if [outcome for _, outcome in self.outcomes(module, tree, [unchanged], items, seen)] != ["survived"]:
            pytest.exit(f"the tests of {module.__name__} fail without a mutant: fix them first")
        counts, started = Counter[str](), time.perf_counter()
        for mutant, outcome in self.outcomes(module, tree, mutants, items, seen):
            counts[outcome] += 1
            if outcome != "killed":
                self.survivors.append(f"{path.stem}.{mutant}")
                print(f"{outcome}: {self.survivors[-1]}", flush=True)
        minutes = (time.perf_counter() - started) / 60
        share = 1 - counts["survived"] / max(1, len(mutants))
        results = [len(mutants), counts["killed"], counts["timed out"], counts["survived"], f"{share:.1%}"]
        self.table.append("| " + " | ".join(map(str, [path.stem, *results, f"{minutes:.1f}"])) + " |")
        print(self.table[-1], flush=True)

    def watch(self, path: Path, items: Sequence[pytest.Item]) -> Seen:
        """Run all tests and record their lines. Every fork then has the state that hypothesis and torch prepare."""
        seen: Seen = {}
        for item in items:
            lines: set[int] = set()

            def local(frame: FrameType, _event: str, _: object, lines: set[int] = lines) -> Any:
                lines.add(frame.f_lineno)
                return local

            def trace(frame: FrameType, _event: str, _: object, local: Any = local) -> Any:
                return local if frame.f_code.co_filename == str(path) else None

            started = time.process_time()
            sys.settrace(trace)
            self.passes(item)
            sys.settrace(None)
            seen[item.nodeid] = time.process_time() - started, lines
        return seen

    def trial(
        self, module: ModuleType, tree: ast.Module, mutant: Mutant, items: Sequence[pytest.Item], limit: int
    ) -> None:
        silent = os.open(os.devnull, os.O_WRONLY)
        for output in (1, 2):
            os.dup2(silent, output)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        try:
            put_in_place(tree, mutant)
            put_into(module, compile(tree, str(module.__file__), "exec"))
        except Exception:  # a broken module may raise anything
            os._exit(NOTICED)
        os._exit(UNNOTICED if all(self.passes(item) for item in items) else NOTICED)

    def outcomes(
        self, module: ModuleType, tree: ast.Module, mutants: Sequence[Mutant], items: Sequence[pytest.Item], seen: Seen
    ) -> Iterator[tuple[Mutant, str]]:
        by_time = sorted(items, key=lambda item: seen[item.nodeid][0])
        within_functions = function_lines(tree)
        waiting, running = list(mutants), dict[Any, tuple[Any, Mutant]]()
        while waiting or running:
            while waiting and len(running) < self.jobs:
                mutant = waiting.pop(0)
                everywhere = within_functions.isdisjoint(mutant.lines)
                reached = [item for item in by_time if everywhere or seen[item.nodeid][1].intersection(mutant.lines)]
                limit = 30 + int(5 * sum(seen[item.nodeid][0] for item in reached))  # CPU seconds of the fork
                process = FORK.Process(target=self.trial, args=(module, tree, mutant, reached, limit))
                process.start()
                running[process.sentinel] = process, mutant
            for sentinel in wait(list(running)):
                process, mutant = running.pop(sentinel)
                process.join()
                outcome = {UNNOTICED: "survived", -signal.SIGXCPU: "timed out", -signal.SIGKILL: "timed out"}
                yield mutant, outcome.get(process.exitcode, "killed")


def ending_at_once(test: Callable[..., None]) -> Callable[..., None]:
    """Return a test that ends the fork at its first failure, because hypothesis takes seconds to shrink a failure."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            test(*args, **kwargs)
        except hypothesis.errors.HypothesisException:
            raise
        except Exception:
            if parent_process() is None:
                raise
            os._exit(NOTICED)

    return run


def function_lines(tree: ast.AST) -> set[int]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {line for node in functions for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("modules", nargs="*", metavar="module", help=f"any of {', '.join(MODULES)}; all if not given")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tested at the same time")
    parser.add_argument("--out", type=Path, help="write the survivors to this file")
    parser.add_argument("--again", type=Path, help="test only the mutants in a file written by --out")
    options = parser.parse_args()
    if unknown := set(options.modules) - set(MODULES):
        parser.error(f"unknown module: {', '.join(unknown)}")
    hypothesis.settings.register_profile(
        "mutants",
        deadline=None,
        derandomize=True,
        max_examples=20,  # a third of the number in `make test`, which may find more
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],  # without shrinking failures
    )
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT / "src"))
    again = options.again.read_text().splitlines() if options.again else None
    modules = options.modules or list(MODULES)
    bench = Bench(modules, again, options.jobs)
    plain = ["-s", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-profile=mutants"]
    plain += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is imported before pytest starts
    tests = [f"tests/{MODULES[name]}/test_{name}.py" for name in modules]
    status = pytest.main([*plain, *tests], plugins=[bench])
    print("| module | mutants | killed | timed out | survived | noticed | minutes |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    print("\n".join(bench.table))
    if options.out:
        options.out.write_text("\n".join(bench.survivors) + "\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
