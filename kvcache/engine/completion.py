"""The shapes of `/v1/completions` and `/v1/chat/completions`, as OpenAI's clients send and expect them.

Unsupported parameters (streams, several choices, log probabilities, penalties) are refused, never ignored. The neutral
value of each is accepted.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictStr,
    ValidationError,
    model_validator,
)

from kvcache.engine.sampling import SamplingParams
from kvcache.engine.sequence import RequestOutput
from kvcache.errors import KVCacheError

if TYPE_CHECKING:
    from typing_extensions import Self


class RequestError(KVCacheError, ValueError):
    """A body that cannot be served: names the field and what is valid."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CompletionRequestBase(BaseModel):
    """The fields of both request types."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: StrictStr
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Annotated[
        list[StrictStr],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        Field(max_length=4),
    ] = []
    ignore_eos: bool = False
    user: StrictStr = ""
    n: Literal[1] = 1
    stream: Literal[False] = False
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    @classmethod
    def read(cls, body: Any) -> Self:
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            if first["type"] == "extra_forbidden":
                raise RequestError(f"{name}: this server does not support the parameter; remove it", name) from None
            if first["type"] == "missing":
                raise RequestError(f"{name}: missing, and there is no default", name) from None
            found = f"{name} = {first['input']!r}" if name else f"a body of {type(body).__name__}"
            raise RequestError(
                f"{found}: {first['msg'].replace('Input should be', 'expected')}", name or None
            ) from None

    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=tuple(self.stop),
            ignore_eos=self.ignore_eos,
        )


class CompletionRequest(CompletionRequestBase):
    prompt: Any
    best_of: Literal[1] = 1
    echo: Literal[False] = False

    def prompts(self, encode: Callable[[str], list[int]]) -> list[list[int]]:
        """Return the prompts as token ids, from a string, a list of ids, or a list of either. The engine checks the
        ids."""
        given = self.prompt
        if not isinstance(given, list) or (given and _is_ids(given)):
            given = [given]
        if not given:
            raise RequestError("prompt = []: give a string, token ids, or a list of either", "prompt")
        prompts = []
        for prompt in given:
            if isinstance(prompt, str):
                prompts.append(encode(prompt))
            elif isinstance(prompt, list) and _is_ids(prompt):
                prompts.append(prompt)
            else:
                found = type(prompt).__name__
                raise RequestError(
                    f"prompt: found {found}, expected a string, token ids, or a list of either", "prompt"
                )
        return prompts


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    role: StrictStr
    content: StrictStr


class ChatRequest(CompletionRequestBase):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int = Field(default=16, validation_alias=AliasChoices("max_tokens", "max_completion_tokens"))

    def prompts(self, chat: Callable[[Sequence[Mapping[str, str]]], list[int]]) -> list[list[int]]:
        """Return the one prompt, from the model's template; ModelError where the template refuses the messages."""
        return [chat([message.model_dump() for message in self.messages])]


def _is_ids(items: list[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in items)


def completion_body(
    model: str, results: Sequence[RequestOutput], texts: Sequence[str], *, chat: bool = False
) -> dict[str, Any]:
    prompt_tokens = sum(r.prompt_tokens for r in results)
    completion_tokens = sum(len(r.token_ids) for r in results)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {"index": i, **_message_field(text, chat=chat), "logprobs": None, "finish_reason": result.finish}
            for i, (result, text) in enumerate(zip(results, texts, strict=True))
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(r.reused_tokens for r in results)},
        },
    }


def _message_field(text: str, *, chat: bool) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}} if chat else {"text": text}


def answer_text(result: RequestOutput, decode: Callable[[list[int]], str], stops: Sequence[str]) -> str:
    """Return the answer without the stop string that ended it."""
    whole = decode(result.token_ids)
    return whole[: min((at for stop in stops if (at := whole.find(stop)) >= 0), default=len(whole))]


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
