"""What is asked of whom, in which order: one user request, worked on by three agents in ten calls.

A script is a generator: it yields a prompt and is sent the answer's token ids, since later prompts contain earlier
answers. Each agent has a conversation of its own behind the shared text, and every follow-up extends it by the answer
before and a new message, as agent programs do.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from kvcache.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    agent: str
    token_ids: list[int]


Script = Generator[Prompt, list[int], None]


@dataclass(frozen=True, slots=True)
class Step:
    """One call: `message` may name earlier answers in braces; the answer is known as `answer` from then on."""

    agent: str
    message: str
    answer: str


REQUEST = (
    "Our three assistants read the same long instructions before every answer, and each of our servers computes them "
    "again. Set up kvcache so that they are computed once, even after a restart."
)

STEPS: Sequence[Step] = (
    Step("planner", f"You are the planner. The user asks: {REQUEST} Which steps are needed?", "plan"),
    Step("critic", "You are the critic. The plan is: {plan} What is its weakest step?", "doubt"),
    Step("planner", "The critic says: {doubt} Give the plan again, with that step made better.", "better"),
    Step("executor", "You are the executor. The plan is: {better} Carry out the first step.", "first"),
    Step("executor", "Now the second step: choose the tiers.", "second"),
    Step("critic", "The executor did this: {first} And this: {second} What is missing?", "missing"),
    Step("executor", "The critic says: {missing} Add what is missing.", "third"),
    Step("executor", "Now test it: restart the server, and tell what you see.", "test"),
    Step("critic", "The executor reports: {third} And: {test} Is the user's request met?", "verdict"),
    Step("planner", "The critic's verdict: {verdict} Write the final answer for the user.", "final"),
)


def agents(tokenizer: Tokenizer, shared: Mapping[str, str]) -> Script:
    """The multi-agent case; `shared` is what stands before every conversation, part by part."""
    system = {"role": "system", "content": "\n\n".join(shared.values())}
    talks: dict[str, list[dict[str, str]]] = {step.agent: [system] for step in STEPS}
    answers: dict[str, str] = {}
    for step in STEPS:
        talk = talks[step.agent]
        talk.append({"role": "user", "content": step.message.format(**answers)})
        answer = tokenizer.decode((yield Prompt(step.agent, tokenizer.chat(talk))))
        talk.append({"role": "assistant", "content": answer})
        answers[step.answer] = answer


def recorded(prompts: Sequence[Prompt]) -> Script:
    """Prompts that are known beforehand: no answer changes them."""
    for prompt in prompts:
        _ = yield prompt
