"""`kvcache lint`: reports how much a log of prompts could reuse, and which texts in the prompts limit it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcache.cli.output import JsonOption, OutputFormat, OutputOption, print_json, print_table
from kvcache.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from kvcache.engine.tokenizer import Tokenizer
    from kvcache.trace.lint import BreakGroup, LintReport

TEXT_FIELDS = ("prompt", "input", "text")
ID_FIELDS = ("token_ids", "prompt_token_ids", "input_ids")


def lint(
    requests: Annotated[
        Path,
        typer.Argument(help="JSON lines in order of time, each with `messages`, `prompt`, `input` or `token_ids`."),
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", help="The tokenizer's model: a directory, a name, or `smollm2`.")
    ],
    block_tokens: Annotated[int, typer.Option(min=1, max=65535, help="Tokens in a block.")] = 16,
    top: Annotated[int, typer.Option("--top", min=1, help="Number of texts to list, the most expensive first.")] = 10,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """Report how much of a request log repeats, and which texts prevent reuse.

    Prints the hit rate of an unlimited cache, the texts after which prompts continue alike, and the hit rate if these
    texts stood at the end. Needs only the tokenizer.
    """
    import numpy as np

    from kvcache.cli.explain import tokenizer_of
    from kvcache.trace.lint import lint_prompts

    tokenizer = tokenizer_of(model)
    prompts = [np.asarray(ids, np.uint32) for ids in read_requests(requests, tokenizer)]
    if not prompts:
        raise ConfigError(f"{requests}: found no requests; expected JSON lines")
    found = lint_prompts(prompts, block_tokens)
    texts = [_example(group, tokenizer) for group in found.groups[:top]]
    if as_json or output is OutputFormat.json:
        print_json({**_figures(found), "texts": texts})
        return
    print_table(("", ""), _rows(found))
    if texts:
        print("\nText at which otherwise equal prompts diverge, so that it ends the shared prefix.\n")
        print_table(
            ("tokens lost", "requests", "at token", "what", "behind", "for example", "and"),
            [
                (
                    f"{text['lost_tokens']:,}",
                    f"{text['requests']:,}",
                    f"{text['token']:,}",
                    text["what"],
                    repr(text["before"][-24:]),
                    repr(text["ours"][:40]),
                    repr(text["theirs"][:40]),
                )
                for text in texts
            ],
        )
        print("\nMove these to the end of the prompt, or remove them.")


def read_requests(path: Path, tokenizer: Tokenizer) -> Iterator[Sequence[int]]:
    """Yield the token ids of each request."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield _ids(json.loads(line), tokenizer)
                except (ValueError, TypeError, KeyError, ModelError) as error:
                    raise ConfigError(f"{path}, line {number}: {error}") from None


def _ids(request: Any, tokenizer: Tokenizer) -> Sequence[int]:
    if not isinstance(request, Mapping):
        raise ValueError(
            f"found {type(request).__name__}, expected an object with {', '.join(('messages', *TEXT_FIELDS))}"
        )
    inner = request.get("body", request)
    for name in ID_FIELDS:
        if name in inner:
            return [int(token) for token in inner[name]]
    if "messages" in inner:
        return _chat(inner["messages"], tokenizer)
    for name in TEXT_FIELDS:
        if isinstance(inner.get(name), str):
            return tokenizer.encode(inner[name])
        if isinstance(inner.get(name), list):
            given = inner[name]
            return given if all(isinstance(token, int) for token in given) else _chat(given, tokenizer)
    raise ValueError(f"expected one of {', '.join(('messages', *TEXT_FIELDS, *ID_FIELDS))}")


def _chat(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> Sequence[int]:
    """Return the ids from the model's template; without a template, of role and content in turn."""
    plain = [{"role": str(message["role"]), "content": _content(message.get("content"))} for message in messages]
    try:
        return tokenizer.chat(plain)
    except ModelError:
        return tokenizer.encode("".join(f"<|{m['role']}|>\n{m['content']}\n" for m in plain))


def _content(content: Any) -> str:
    """Return the text of a content; of several parts, their texts joined."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def _example(group: BreakGroup, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the form of the difference, where most of the group share one, and its most expensive example."""
    from kvcache.observe.recent_requests import find_varying_text, first_difference

    examples = sorted(group.breaks, key=lambda each: -each.lost_tokens)
    forms: dict[str, int] = {}
    pairs = []
    for each in examples[:50]:
        ours, theirs = (
            tokenizer.decode([*each.before.tolist(), *side.tolist(), *each.following.tolist()])
            for side in (each.ours, each.theirs)
        )
        found = find_varying_text(ours, theirs, first_difference(ours, theirs))
        what = found.name if found is not None else "text"
        forms[what] = forms.get(what, 0) + 1
        pairs.append((what, ours, theirs, found))
    what = max(forms, key=lambda name: forms[name])
    _, ours, theirs, found = next(pair for pair in pairs if pair[0] == what)
    at = first_difference(ours, theirs) if found is None else max(0, ours.find(found.ours))
    return {
        "lost_tokens": group.lost_tokens,
        "requests": len(group.breaks),
        "token": group.first,
        "what": what,
        "before": ours[:at],
        "ours": ours[at:] if found is None else found.ours,
        "theirs": theirs[at:] if found is None else found.theirs,
    }


def _figures(found: LintReport) -> dict[str, Any]:
    return {
        "requests": found.prompts,
        "tokens": found.tokens,
        "repeated_share": found.repeated_tokens / found.tokens if found.tokens else 0.0,
        "hit_rate": found.rate,
        "moved_hit_rate": found.moved_rate,
    }


def _rows(found: LintReport) -> list[tuple[str, str]]:
    figures = _figures(found)
    return [
        ("requests", f"{found.prompts:,}"),
        ("input tokens", f"{found.tokens:,}"),
        ("of tokens that an earlier request had at any position", f"{figures['repeated_share']:.1%} at least"),
        ("hit rate with unlimited memory", f"{figures['hit_rate']:.1%}"),
        ("the same, with the listed texts moved to the end", f"{figures['moved_hit_rate']:.1%}"),
    ]


def register(app: typer.Typer) -> None:
    app.command("lint")(lint)
