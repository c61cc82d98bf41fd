"""Nothing decides by searching the text of an error, which holds paths, ports and times.

Types, status codes and errno say what happened.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[1] / "kvcache").rglob("*.py"))

TEXTS = {"str", "repr", "format", "format_exc", "format_exception", "format_exception_only"}
"""Functions whose result is the text of an error that they are given."""
ATTRIBUTES = {"args", "message", "strerror", "filename", "stderr", "stdout", "output", "__notes__"}
"""Of an error, its text or a part of it."""
SEARCHES = {
    *("startswith", "endswith", "find", "rfind", "index", "rindex", "count"),
    *("match", "search", "fullmatch", "findall", "finditer", "fnmatch", "fnmatchcase", "__contains__"),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def searches(tree: ast.AST) -> Iterator[int]:
    """The lines that search the text of an error."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.name:
            yield from searched(node, {node.name})
        elif isinstance(node, Function):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            errors = {each.arg for each in given if each.annotation is not None and is_error(each.annotation)}
            yield from searched(node, errors) if errors else ()


def is_error(annotation: ast.expr) -> bool:
    names = (node.id for node in ast.walk(annotation) if isinstance(node, ast.Name))
    return any(name.endswith(("Error", "Exception")) for name in names)


def searched(scope: ast.AST, errors: set[str]) -> Iterator[int]:
    texts: set[str] = set()  # variables that hold such a text
    while True:
        names = {
            target.id
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None
            if is_text(node.value, errors, texts)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        if names <= texts:
            break
        texts |= names
    for node in ast.walk(scope):
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            parts = [node.subject]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SEARCHES:
            parts = [node.func.value, *node.args]
        else:
            continue
        if any(is_text(part, errors, texts) for part in parts):
            yield node.lineno


def is_text(node: ast.expr, errors: set[str], texts: set[str]) -> bool:
    """Whether this is the text of one of these errors, or made of it."""
    match node:
        case ast.Name():
            return node.id in texts
        case ast.Attribute(value=ast.Name(id=name)) if name in errors:
            return node.attr in ATTRIBUTES
        case ast.Attribute(value=of) | ast.Subscript(value=of) | ast.Starred(value=of):
            return is_text(of, errors, texts)
        case ast.Call(func=func, args=args):
            name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
            if name in TEXTS and any(isinstance(arg, ast.Name) and arg.id in errors for arg in args):
                return True
            return isinstance(func, ast.Attribute) and is_text(func.value, errors, texts)
        case ast.JoinedStr():
            held = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
            return any(is_text(v, errors, texts) or (isinstance(v, ast.Name) and v.id in errors) for v in held)
        case ast.BinOp(left=left, right=right):
            return is_text(left, errors, texts) or is_text(right, errors, texts)
        case ast.BoolOp(values=values):
            return any(is_text(value, errors, texts) for value in values)
        case ast.IfExp(body=body, orelse=other):
            return is_text(body, errors, texts) or is_text(other, errors, texts)
    return False


def test_no_error_is_searched_as_text() -> None:
    found = {f"{path}:{line}" for path in SOURCES for line in searches(ast.parse(path.read_text(encoding="utf-8")))}
    assert not found, f"{sorted(found)}: decide by the type, the status or errno of the error, not by its text"


@pytest.mark.parametrize(
    "decides",
    [
        "'416' in str(error)",
        "'416' not in repr(error).lower()",
        "str(error) == 'closed'",
        "f'{error}'.startswith('Generic')",
        "error.args[0] == 'closed'",
        "'full' in (error.strerror or str(error))",
        "re.search('4[0-9]+', str(error))",
        "str(error).splitlines()[0].endswith('416')",
        "any(word in str(error) for word in words)",
        "'x' in traceback.format_exception(error)",
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        "try:\n    call()\nexcept OSError as error:\n    if {}:\n        raise",
        "def decides(error: Exception) -> bool:\n    return bool({})",
    ],
)
def test_a_search_of_an_error_is_found(decides: str, form: str) -> None:
    assert list(searches(ast.parse(form.format(decides))))


def test_a_search_of_a_variable_is_found() -> None:
    said = "try:\n    call()\nexcept OSError as error:\n    said = str(error).lower()\n    first = said[:9]\n    "
    assert list(searches(ast.parse(said + "print('416' in first)")))


@pytest.mark.parametrize(
    "reports",
    [
        "raise ConfigError(f'{path}: {error.strerror or error}') from None",
        "log.warning('%s', str(error).splitlines()[0][:200])",
        "again = isinstance(error, TimeoutError) or error.errno == errno.ENOSPC or error.code in {401, 403}",
        "found = path in known and error.check == 'room'",
    ],
)
def test_printing_an_error_is_not_searching_its_text(reports: str) -> None:
    assert not list(searches(ast.parse(f"try:\n    call()\nexcept OSError as error:\n    {reports}")))
