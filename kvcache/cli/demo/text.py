"""The text that the agents share: this project's own documentation, read from the sources that are installed.

Three parts in the proportion 2 : 3 : 5 in tokens: a system prompt (what the rooms are), tool descriptions (functions
with what they promise) and examples (questions with their answers). Nothing is imported for it, so that it is the same
whatever extras are there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvcache.engine.tokenizer import Tokenizer
from kvcache.errors import ConfigError

PROPORTION = {"system prompt": 2, "tool descriptions": 3, "examples": 5}
SHARED_TOKENS = 4200

_PACKAGE = Path(__file__).parents[2]
_RULES = "You work in a team of three agents: a planner, a critic and an executor. Answer in one short sentence.\n"


@dataclass(frozen=True, slots=True)
class Page:
    """The documentation of one module, class or function."""

    kind: type[ast.AST]
    name: str  # of a function with its arguments
    text: str

    @property
    def claim(self) -> str:
        """Its first paragraph, on one line."""
        return self.text.partition("\n\n")[0].replace("\n", " ")


def pages() -> Iterator[Page]:
    """What is documented in the package, module by module in order of name."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        parts = path.relative_to(_PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield from _pages(name, ast.parse(path.read_text(encoding="utf-8")))


def _pages(name: str, node: ast.Module | ast.ClassDef | ast.FunctionDef) -> Iterator[Page]:
    text = ast.get_docstring(node)
    if text:
        yield Page(type(node), f"{name}({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef) else name, text)
    for inner in node.body:
        if isinstance(inner, (ast.ClassDef, ast.FunctionDef)) and not inner.name.startswith("_"):
            yield from _pages(f"{name}.{inner.name}", inner)


def parts() -> dict[str, str]:
    """The three parts, each longer than it will be."""
    every = list(pages())
    modules = [page for page in every if page.kind is ast.Module]
    functions = [page for page in every if page.kind is ast.FunctionDef]
    return {
        "system prompt": _RULES + "".join(f"{page.name}: {page.claim}\n" for page in modules),
        "tool descriptions": "".join(f"{page.name}: {page.text}\n" for page in functions),
        "examples": "".join(f"Question: what is {page.name}?\nAnswer: {page.text}\n\n" for page in every),
    }


def shared(tokenizer: Tokenizer, tokens: int = SHARED_TOKENS) -> dict[str, str]:
    """The three parts, cut to their share of `tokens`."""
    whole = sum(PROPORTION.values())
    return {name: _cut(tokenizer, name, text, tokens * PROPORTION[name] // whole) for name, text in parts().items()}


def _cut(tokenizer: Tokenizer, name: str, text: str, tokens: int) -> str:
    ids = tokenizer.encode(text)
    if len(ids) < tokens:
        raise ConfigError(f"{name} of {len(ids)} tokens: expected {tokens} from the sources of kvcache in {_PACKAGE}")
    return tokenizer.decode(ids[:tokens])
