"""OpenAI's client at a server: python openai_client.py URL. It reads prompts (token ids) as JSON on standard input and
prints a line of JSON for each: its text and the number of its tokens that were cached."""

from __future__ import annotations

import json
import sys

from openai import OpenAI


def main(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=900) as client:
        model = client.models.list().data[0].id
        for prompt in json.load(sys.stdin):
            answer = client.completions.create(model=model, prompt=prompt, max_tokens=8, temperature=0)
            details = answer.usage.prompt_tokens_details if answer.usage else None
            print(json.dumps([answer.choices[0].text, (details.cached_tokens if details else 0) or 0]))


if __name__ == "__main__":
    main(sys.argv[1])
