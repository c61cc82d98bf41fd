"""`kvcache explain`: explains in words why a prompt was not found."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcache.cli.daemon import AddressOption, find_one_cache
from kvcache.cli.output import JsonOption, OutputFormat, OutputOption, print_json, print_table
from kvcache.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from kvcache.engine.tokenizer import Tokenizer

# Prompts on the command line: token ids, or text for a tokenizer.


def parse_token_ids(text: str, model: str | None) -> bytes:
    """Return the ids as uint32, little-endian; ConfigError where they cannot be determined."""
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if isinstance(given, list):
        try:
            return array("I", given).tobytes()
        except (TypeError, OverflowError):
            raise ConfigError("a JSON list, but not of token ids: expected integers from 0 to 4294967295") from None
    if model is None:
        raise ConfigError(
            f"{text[:40]!r}: the cache has no recent request with this id; for a prompt, name its tokenizer "
            "with --model, or give its token ids as a JSON list"
        )

    return array("I", tokenizer_of(model).encode(text)).tobytes()


MissStory = Mapping[str, Any]
Decode = Callable[[Sequence[int]], str]

COLUMNS = ("time", "request", "model", "tokens", "found", "why", "at")

ADVICE: Mapping[str, str] = {
    "cold": "nothing, if the prompt is new. Otherwise check that the engine stores, and into this cache.",
    "evicted": "more memory keeps more: raise host.capacity_bytes or nvme.capacity_bytes.",
    "expired": "raise `ttl_s` of the request or the namespace.",
    "diverged": "reuse ends at the first token that differs: put the parts that change between requests at the end "
    "of the prompt.",
    "apart": "give both the same value in that field, if they may share blocks.",
    "store_dropped": "the store found no capacity or no time: see `drops` in `kvcache stats`.",
    "store_failed": "the write failed: see the cache's log, and `kvcache doctor`.",
    "refused": "its bytes differ from those stored: `kvcache check` verifies all other records.",
    "late": "the tier is slow or busy: `kvcache doctor` measures it; flow.deadline_s limits the wait.",
    "no_room": "host memory is too small for the concurrent requests: raise host.capacity_bytes.",
    "failed": "see the cache's log for this request's id.",
    "below_plan": "use a faster tier: recomputation takes less time than this load.",
    "bypass": "`kvcache bypass off` restores the cache.",
    "quota": "the tenant exceeds its rate limit: raise `bandwidth` or `operations` in the tenants file.",
}


def explain(
    what: Annotated[
        str | None,
        typer.Argument(
            help="A request's id, a prompt, a JSON list of token ids, or @FILE with either. Default: the last request."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The tokenizer's model: a directory, a name, or `smollm2`.")
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="The first digits of a namespace id. Only that namespace is searched.")
    ] = "",
    count: Annotated[int, typer.Option("--tail", "-n", min=1, help="Number of recent misses.")] = 10,
    address: AddressOption = None,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """Explain why a request or a prompt did not match further.

    Names the first missing block, where the prompt diverges from an earlier one, when and why its blocks were removed,
    and which other namespace has them.
    """
    stories = list(_stories(find_one_cache(address), what, model, namespace, count))
    if as_json or output is OutputFormat.json:
        print_json(stories)
    elif what is None:
        print_table(COLUMNS, [_row(story) for story in stories])
    else:
        for story in stories:
            print("\n".join(describe_story(story, _decode(story, model))))


def _stories(path: Path, what: str | None, model: str | None, namespace: str, count: int) -> Iterator[MissStory]:
    from kvcache.daemon.client.control import send_command

    if what is None:
        yield from send_command(path, "explain", count=count)["stories"]
        return
    text = Path(what[1:]).read_text(encoding="utf-8") if what.startswith("@") else what
    stories = send_command(path, "explain", request=text)["stories"] if len(text) < 256 else []
    if not stories:
        stories = send_command(path, "explain", ids=parse_token_ids(text, model), namespace=namespace)["stories"]
    yield from stories


def _decode(story: MissStory, model: str | None) -> Decode | None:
    """Return the decoder of the tokenizer that was named, or of the namespace's model; None without a tokenizer."""

    if model is not None:
        return tokenizer_of(model).decode
    known = known_tokenizer(str(story["namespace"].get("model") or ""))
    return None if known is None else known.decode


def _row(story: MissStory) -> tuple[str, ...]:
    tokens = story["block_tokens"]
    return (
        datetime.fromtimestamp(story["time"]).astimezone().time().isoformat("seconds"),
        story["request"],
        story["namespace"].get("model", story["namespace"]["id"][:8]),
        f"{story['blocks'] * tokens:,}",
        f"{story['found_blocks'] * tokens:,}",
        story["reason"],
        f"token {story['token']:,}" if "token" in story else "",
    )


def describe_story(story: MissStory, decode: Decode | None) -> Iterator[str]:
    """Describe a miss in sentences, with the text of the tokens where they can be decoded."""
    from kvcache.observe.reasons import meaning

    tokens, space = story["block_tokens"], story["namespace"]
    origin = "".join(f" of {name} {story[name]}" for name in ("agent", "session") if name in story)
    request = f"Request {story['request']}{origin}, {_ago(story['ago_s'])}"
    who = request if story["request"] else "This prompt, looked up now"
    yield f"{who}, model {space.get('model', '?')} (namespace {space['id'][:8]})."
    found = story["found_blocks"] * tokens
    yield f"{story['blocks'] * tokens:,} tokens in full blocks of {tokens}; the first {found:,} of them were found."
    reason = story["reason"]
    if not reason:
        yield "Nothing is missing."
        return
    yield f"The prefix ends there: {reason} ({meaning('misses', 'reason', reason)})."
    yield from _evidence(story, decode)
    yield f"Remedy: {ADVICE[reason]}"


def _evidence(story: MissStory, decode: Decode | None) -> Iterator[str]:
    if "lost_ago_s" in story:
        verb = {"evicted": "left", "refused": "was refused by"}.get(story["reason"], "was not stored in")
        yield f"The block {verb} {story['tier']} {_ago(story['lost_ago_s'])} ({story['why']})."
    if "age_requests" in story:
        yield f"Its last use was {story['age_requests']:,} requests, {_format_duration(story['age_s'])}."
    if "outcome" in story:
        yield f"The load ended as {story['outcome']}."
    if "plan" in story:
        plan = story["plan"]
        load, compute = _format_duration(plan["load_s"]), _format_duration(plan["compute_s"])
        yield f"The plan expected {load} for loading the rest and {compute} for computing it."
    other = story.get("other")
    if other is None:
        return
    name = f"request {other['request']}, {_ago(other['ago_s'])}"
    if story["reason"] == "apart":
        yield f"They are those of {name}, in namespace {other['namespace']['id'][:8]}."
        for field, (ours, theirs) in story.get("differs", {}).items():
            yield f"  {field}: here {ours}, there {theirs}"
    elif story["reason"] == "diverged":
        yield from _describe_divergence(story, name, decode)
    else:
        yield f"{name} used the same prompt before, but has not stored it."


def _describe_divergence(story: MissStory, other: str, decode: Decode | None) -> Iterator[str]:
    if "token" not in story:
        yield f"It diverges from {other} within block {story['block']:,}; the cache does not have the tokens any more."
        return
    at, meet = story["token"], story.get("meet")
    yield f"It diverges from {other} at token {at:,}, in block {story['block']:,}."
    if decode is None:
        yield f"  here  {story['ours'][:8]}...\n  there {story['theirs'][:8]}..."
        yield "  (token ids; --model names a tokenizer)"
    else:
        yield from _divergence_text(story, decode)
    if meet is not None:
        yield (
            f"{meet['ours']} tokens on ({meet['theirs']} there) both go on alike, for {meet['tokens']:,} tokens that "
            "could be found if what differs came behind them."
        )


def _divergence_text(story: MissStory, decode: Decode) -> Iterator[str]:
    from kvcache.observe.recent_requests import find_varying_text, first_difference

    ours, theirs = (decode([*story["before"], *story[side]]) for side in ("ours", "theirs"))
    at = first_difference(ours, theirs)
    for side, text in (("here ", ours), ("there", theirs)):
        yield f"  {side} ...{text[max(0, at - 40) : at]!r} then {text[at : at + 40]!r}..."
    found = find_varying_text(ours, theirs, at)
    if found is not None:
        yield f"That is {found.name}: {found.ours!r} here, {found.theirs!r} there."


def _ago(seconds: float) -> str:
    return f"{_format_duration(seconds)} ago"


def _format_duration(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


# The tokenizer of a model, from the place of its `tokenizer.json`: a directory, the file itself, a model in a Python
# package, or the cache of `huggingface_hub`. Nothing is downloaded.


def tokenizer_of(model: str) -> Tokenizer:
    """Return the tokenizer of a model; ModelError where it has none."""
    from kvcache.engine.tokenizer import Tokenizer

    for directory in _directories(model):
        if (directory / "tokenizer.json").is_file():
            return Tokenizer(str(directory))
    from kvcache.engine.checkpoint import resolve_model

    return Tokenizer(resolve_model(model))


def known_tokenizer(model: str) -> Tokenizer | None:
    """Return the tokenizer of a model; None where it has none, or the library for it is missing."""
    try:
        return tokenizer_of(model)
    except (ModelError, ModuleNotFoundError):
        return None


def _directories(model: str, environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    given = Path(model).expanduser()
    yield given.parent if given.name == "tokenizer.json" else given
    if model.count("/") == 1:
        home = Path(environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
        hub = Path(environ.get("HF_HUB_CACHE") or home / "hub")
        yield from sorted((hub / f"models--{model.replace('/', '--')}" / "snapshots").glob("*"))


def register(app: typer.Typer) -> None:
    app.command("explain")(explain)
