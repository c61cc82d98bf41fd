"""Every call that `model.generate` accepts gives the same answer over a warm store, which serves it or declines it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from transformers import GenerationConfig

import kvcache
from kvcache.connector.transformers import PrefixStore

LENGTH, BLOCK = 40, 8
PROMPT = torch.randint(5, 250, (1, LENGTH // 2), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
OTHER = torch.randint(5, 250, (1, LENGTH), generator=torch.Generator().manual_seed(1))
ROWS = torch.cat((PROMPT, torch.cat((PROMPT[:, :24], OTHER[:, :16]), 1)))
PADDED = torch.cat((torch.cat((torch.zeros_like(OTHER[:, :5]), PROMPT[:, :35]), 1), PROMPT))
MASK = (PADDED != 0).long()
WORD = "cache" if "cache" in signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
PLAIN: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

Call = tuple[tuple[Any, ...], dict[str, Any]]


def made(seed: int = 1, **fields: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields = {"vocab_size": 256, "initializer_range": 0.3, "attn_implementation": "eager"} | sizes | fields
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).eval()


def windowed() -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields = {"vocab_size": 256, "initializer_range": 0.3, "num_key_value_heads": 2, "sliding_window": 12}
    return transformers.MistralForCausalLM(transformers.MistralConfig(**fields, **sizes)).eval()


class Streamer(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.flatten().tolist())

    def end(self) -> None:
        self.seen.append([-1])


def words() -> Any:
    """A tokenizer each of whose tokens is a letter."""
    letters = {chr(0x4E00 + i): i for i in range(254)} | {
        "abcdef": 254,
        "?": 255,
    }  # transformers probes with the former
    model = tokenizers.models.WordLevel(letters, unk_token="?")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model))


def stops(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
    return torch.full((len(ids),), ids.shape[1] >= LENGTH + 3)


def warms(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.roll(1, -1)


def own_loop(model: Any, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
    return input_ids.flip(1)


def plain(*args: Any, **named: Any) -> Call:
    return args, PLAIN | named


def config(**named: Any) -> GenerationConfig:
    return GenerationConfig(**PLAIN | named)


SERVED: dict[str, Callable[[], Call]] = {
    "positional": lambda: plain(PROMPT),
    "input_ids": lambda: plain(input_ids=PROMPT),
    "inputs": lambda: plain(inputs=PROMPT),
    "configuration second": lambda: ((PROMPT, config()), {}),
    "configuration by name": lambda: ((PROMPT,), {"generation_config": config()}),
    "processors third": lambda: ((PROMPT, config(), [warms]), {}),
    "processors by name": lambda: plain(PROMPT, logits_processor=[warms]),
    "stopping criteria": lambda: plain(PROMPT, stopping_criteria=[stops]),
    "stop strings": lambda: plain(PROMPT, stop_strings=[chr(0x4E07)], tokenizer=words()),
    "allowed tokens": lambda: plain(PROMPT, prefix_allowed_tokens_fn=lambda row, ids: [5, 6, 7]),
    "streamer": lambda: plain(PROMPT, streamer=Streamer()),
    "one token": lambda: plain(PROMPT, max_new_tokens=1),
    "max_length": lambda: ((PROMPT,), {"max_length": LENGTH + 4, "do_sample": False, "eos_token_id": None}),
    "an end of sequence": lambda: plain(PROMPT, eos_token_id=list(range(0, 256, 3))),
    "sampling": lambda: plain(PROMPT, do_sample=True, top_k=20, top_p=0.9, temperature=0.7),
    "penalties": lambda: plain(PROMPT, repetition_penalty=1.3, no_repeat_ngram_size=2, bad_words_ids=[[7]]),
    "guidance": lambda: plain(PROMPT, guidance_scale=1.5),
    "negative prompt": lambda: plain(PROMPT, guidance_scale=1.5, negative_prompt_ids=OTHER[:, :9]),
    "watermark": lambda: plain(PROMPT, watermarking_config=transformers.WatermarkingConfig(bias=2.5)),
    "scores and logits": lambda: plain(PROMPT, return_dict_in_generate=True, output_scores=True, output_logits=True),
    "one beam": lambda: plain(PROMPT, num_beams=1, num_return_sequences=1, use_cache=True),
    "names without values": lambda: plain(PROMPT, position_ids=None, attention_mask=None, **{WORD: None}),
    "rows": lambda: plain(ROWS, attention_mask=torch.ones_like(ROWS)),
    "padded rows": lambda: plain(PADDED, attention_mask=MASK),
    "padded rows, bool": lambda: plain(PADDED, attention_mask=MASK.bool()),
    "pad equal to end": lambda: plain(PROMPT, pad_token_id=int(PROMPT[0, 3]), eos_token_id=int(PROMPT[0, 3])),
    "int32": lambda: plain(PROMPT.int()),
}
DECLINED: dict[str, tuple[Callable[[], Call], str]] = {
    "use_cache": (lambda: plain(PROMPT, use_cache=False), "use_cache is False"),
    "use_cache, configuration": (lambda: ((PROMPT, config(use_cache=False)), {}), "use_cache is False"),
    "prompt lookup": (lambda: plain(PROMPT, prompt_lookup_num_tokens=4), "assisted_generation"),
    "prompt lookup, configuration": (lambda: ((PROMPT, config(prompt_lookup_num_tokens=4)), {}), "assisted_generation"),
    "assistant": (lambda: plain(PROMPT, assistant_model=made(2)), "assisted_generation"),
    "early exit": (lambda: plain(PROMPT, assistant_early_exit=1), "assisted_generation"),
    "beams": (lambda: plain(PROMPT, num_beams=3), "beam_search"),
    "beams, configuration": (lambda: ((PROMPT, config(num_beams=3)), {}), "beam_search"),
    "sampled beams": (lambda: plain(PROMPT, num_beams=3, do_sample=True), "beam_sample"),
    "group beams": (lambda: plain(PROMPT, num_beams=4, num_beam_groups=2, diversity_penalty=0.5), "group_beam"),
    "constrained beams": (lambda: plain(PROMPT, num_beams=2, force_words_ids=[[7]]), "constrained_beam"),
    "contrastive": (lambda: plain(PROMPT, penalty_alpha=0.6, top_k=4), "contrastive_search"),
    "dola": (lambda: plain(PROMPT, dola_layers="low"), "dola_generation"),
    "sequences": (lambda: plain(PROMPT, do_sample=True, num_return_sequences=2), "num_return_sequences"),
    "static": (lambda: plain(PROMPT, cache_implementation="static"), "cache_implementation is 'static'"),
    "dynamic": (lambda: plain(PROMPT, cache_implementation="dynamic"), "cache_implementation is 'dynamic'"),
    "unknown cache": (lambda: plain(PROMPT, cache_implementation="bogus"), "bogus"),
    "a loop": (lambda: plain(PROMPT, custom_generate=own_loop), "custom_generate given"),
    "a repository": (lambda: plain(PROMPT, custom_generate="/nowhere"), "custom_generate given"),
    "chunks": (lambda: plain(PROMPT, prefill_chunk_size=16), "prefill_chunk_size"),
    "hidden states": (
        lambda: plain(PROMPT, return_dict_in_generate=True, output_hidden_states=True),
        "output_hidden_states",
    ),
    "attentions": (lambda: plain(PROMPT, return_dict_in_generate=True, output_attentions=True), "output_attentions"),
    "positions": (lambda: plain(PROMPT, position_ids=torch.arange(LENGTH)[None] + 3), "position_ids given"),
    "logits to keep": (lambda: plain(PROMPT, logits_to_keep=2), "logits_to_keep given"),
    "embeddings": (lambda: plain(inputs_embeds=torch.ones(1, 9, 64)), "inputs_embeds given"),
    "a cache": (lambda: plain(PROMPT, **{WORD: transformers.DynamicCache()}), " given"),
    "nothing": (lambda: plain(bos_token_id=7), "0 of inputs and input_ids"),
    "twice": (lambda: plain(PROMPT, input_ids=PROMPT), "2 of inputs and input_ids"),
    "a misspelling": (lambda: plain(PROMPT, max_new_tokenz=3), "max_new_tokenz given"),
    "too many": (lambda: ((PROMPT,) * 30, {}), "TypeError"),
    "a list": (lambda: plain(PROMPT.tolist()), "input_ids of type list"),
    "a vector": (lambda: plain(PROMPT[0]), "shape (40,)"),
    "no rows": (lambda: plain(PROMPT[:0]), "shape (0, 40)"),
    "no tokens": (lambda: plain(PROMPT[:, :0]), "shape (1, 0)"),
    "floats": (lambda: plain(PROMPT.float()), "torch.float32"),
    "padding on the right": (lambda: plain(ROWS, attention_mask=MASK.flip(1)), "on the left"),
    "only padding": (lambda: plain(ROWS, attention_mask=torch.tensor([[0], [1]]).expand(2, LENGTH)), "only padding"),
    "inferred padding": (lambda: plain(PADDED), "padding without attention_mask"),
    "inferred by argument": (lambda: plain(PROMPT, pad_token_id=int(PROMPT[0, 0])), "padding without"),
    "mask of twos": (lambda: plain(PROMPT, attention_mask=torch.full_like(PROMPT, 2)), "other than 0 and 1"),
    "mask of halves": (lambda: plain(PROMPT, attention_mask=torch.full(PROMPT.shape, 0.5)), "other than 0 and 1"),
    "longer mask": (lambda: plain(PROMPT, attention_mask=torch.ones(1, 50).long()), "attention_mask of shape"),
    "mask of four dimensions": (lambda: plain(PROMPT, attention_mask=torch.ones(1, 1, 40, 40)), "attention_mask of"),
}


@pytest.fixture
def cache() -> Iterator[kvcache.KVCache]:
    with kvcache.open(host={"capacity_bytes": "16MiB"}, nvme={"enabled": False}, control={"enabled": False}) as cache:
        yield cache


def answer(run: Any, call: Callable[[], Call]) -> Any:
    """Tokens, what was streamed and the shapes of everything else, or the error."""
    args, named = call()
    torch.manual_seed(3)
    try:
        out = run.generate(*args, **named)
    except Exception as error:  # noqa: BLE001  a call that transformers refuses is refused the same way
        return f"{type(error).__name__}: {error}"
    seen = getattr(named.get("streamer"), "seen", None)
    if isinstance(out, torch.Tensor):
        return out.tolist(), seen
    return out.sequences.tolist(), seen, {name: shapes(value) for name, value in out.items()}


def shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, transformers.Cache):
        return type(value).__name__, [(type(layer).__name__, shapes(layer.keys)) for layer in value.layers]
    return [shapes(item) for item in value] if isinstance(value, tuple | list) else value


@pytest.fixture(scope="module")
def warmed() -> Iterator[tuple[kvcache.KVCache, Any, PrefixStore]]:
    with kvcache.open(host={"capacity_bytes": "64MiB"}, nvme={"enabled": False}, control={"enabled": False}) as cache:
        model = made()
        yield cache, model, warm(cache, model)


def warm(cache: kvcache.KVCache, model: Any) -> PrefixStore:
    store = PrefixStore(cache, model, revision="1", block_tokens=BLOCK)
    for ids in (PROMPT, ROWS[1:]):
        store.generate(ids, **PLAIN | {"max_new_tokens": 1})
        assert store.declined == ""
    return store


def usual(store: PrefixStore, model: Any) -> None:
    assert answer(store, lambda: plain(PROMPT)) == answer(model, lambda: plain(PROMPT)), "a plain call after it"
    assert store.reused


@pytest.mark.parametrize("name", SERVED)
def test_a_served_call_gives_the_same_tokens(name: str, warmed: tuple[kvcache.KVCache, Any, PrefixStore]) -> None:
    _, model, store = warmed
    expected = answer(model, SERVED[name])
    assert not isinstance(expected, str), expected
    assert answer(store, SERVED[name]) == expected
    assert store.declined == ""
    assert store.reused >= 24


@pytest.mark.parametrize("name", DECLINED)
def test_a_declined_call_gives_the_same_tokens(name: str, warmed: tuple[kvcache.KVCache, Any, PrefixStore]) -> None:
    (cache, model, store), (call, why) = warmed, DECLINED[name]
    before = cache.stats()["tiers"]["host"]["records"]
    assert answer(store, call) == answer(model, call)
    assert why in store.declined
    assert store.reused == 0
    assert cache.stats()["tiers"]["host"]["records"] == before, "a declined call stores nothing"


def test_a_plain_call_after_all_others_is_unchanged(warmed: tuple[kvcache.KVCache, Any, PrefixStore]) -> None:
    _, model, store = warmed
    usual(store, model)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"use_cache": False}, "use_cache is False"),
        ({"num_beams": 3}, "beam_search"),
        ({"prompt_lookup_num_tokens": 4}, "assisted_generation"),
        ({"assistant_early_exit": 1}, "assisted_generation"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"prefill_chunk_size": 16}, "prefill_chunk_size"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
        ({"do_sample": True, "num_return_sequences": 2}, "num_return_sequences"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("given", [False, True], ids=["alone", "beside an argument"])
def test_the_models_generation_config_is_respected(
    given: bool, fields: dict[str, Any], why: str, cache: kvcache.KVCache
) -> None:
    model = made()
    store = warm(cache, model)
    model.generation_config = config(**fields)
    call: Callable[[], Call] = (
        (lambda: ((PROMPT,), {"generation_config": GenerationConfig(max_new_tokens=5)}))
        if given
        else (lambda: ((PROMPT,), {}))
    )
    assert answer(store, call) == answer(model, call)
    assert why in store.declined


def test_use_cache_of_the_model_config_is_respected(cache: kvcache.KVCache) -> None:
    model = made()
    store = warm(cache, model)
    model.config.use_cache = False
    assert answer(store, SERVED["positional"]) == answer(model, SERVED["positional"])
    assert store.declined == "use_cache is False"
    assert answer(store, SERVED["one beam"]) == answer(model, SERVED["one beam"])
    assert store.declined == "", "an argument use_cache=True outranks the configuration"


@pytest.mark.filterwarnings("ignore:You have modified")
def test_modes_set_in_the_model_config_are_respected(cache: kvcache.KVCache) -> None:
    """transformers 4 takes them from there; 5 refuses the call."""
    model = made()
    store = warm(cache, model)
    model.config.num_beams = 3
    call: Callable[[], Call] = lambda: ((PROMPT,), {"max_new_tokens": 5})  # noqa: E731
    assert answer(store, call) == answer(model, call)
    assert "beam_search" in store.declined or "ValueError" in store.declined


def test_a_models_custom_generate_is_declined(cache: kvcache.KVCache) -> None:
    class Own(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def generate(self, *args: Any, **named: Any) -> Any:
            return super().generate(*args, **named).flip(1)

    model = Own(made().config).eval()
    store = PrefixStore(cache, model, revision="1", block_tokens=BLOCK)
    for _ in range(2):
        assert answer(store, SERVED["positional"]) == answer(model, SERVED["positional"])
        assert "overrides generate" in store.declined


def test_a_model_in_training_stores_nothing(cache: kvcache.KVCache) -> None:
    model = made(attention_dropout=0.5)
    store = PrefixStore(cache, model, revision="1", block_tokens=BLOCK)
    model.train()
    assert answer(store, SERVED["positional"]) == answer(model, SERVED["positional"])
    assert "training" in store.declined
    model.eval()
    assert answer(store, SERVED["positional"]) == answer(model, SERVED["positional"])
    assert store.reused == 0


def test_autocast_and_another_dtype_are_declined(cache: kvcache.KVCache) -> None:
    model = made()
    store = warm(cache, model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert answer(store, SERVED["positional"]) == answer(model, SERVED["positional"])
        assert "autocast" in store.declined
        assert store.past_key_values(PROMPT).get_seq_length() == 0
    usual(store, model)
    model.to(torch.bfloat16)
    assert answer(store, SERVED["positional"]) == answer(model, SERVED["positional"])
    assert "torch.bfloat16" in store.declined


def test_a_returned_cache_is_a_transformers_cache(cache: kvcache.KVCache) -> None:
    model = windowed()
    store = warm(cache, model)
    call: Callable[[], Call] = lambda: plain(PROMPT, return_dict_in_generate=True)  # noqa: E731
    assert answer(store, call) == answer(model, call)
    assert store.reused
    outs = [run.generate(PROMPT, **PLAIN, return_dict_in_generate=True) for run in (model, store)]
    ids = torch.cat((outs[0].sequences, OTHER[:, :4]), 1)
    further = [
        run.generate(ids, **PLAIN, **{WORD: copy.deepcopy(out[WORD])}).tolist()
        for run, out in zip((model, store), outs, strict=True)
    ]
    assert further[0] == further[1]
    assert f"{WORD} given" in store.declined


def test_a_copied_cache_does_not_write_to_the_store(cache: kvcache.KVCache) -> None:
    model = made()
    past = warm(cache, model).past_key_values(PROMPT)
    copied = copy.deepcopy(past)
    assert type(copied) is transformers.DynamicCache
    assert copied.layers[0].keys.data_ptr() != past.layers[0].keys.data_ptr()
    assert torch.equal(copied.layers[1].values, past.layers[1].values)


def test_beam_search_over_a_given_cache_stores_nothing(cache: kvcache.KVCache) -> None:
    """Rows are repeated for beams, so that a row of the cache is no row of the prompt."""
    model = made()
    store = PrefixStore(cache, model, revision="1", block_tokens=BLOCK)
    past = store.past_key_values(ROWS)
    named = PLAIN | {"num_beams": 2}
    assert torch.equal(model.generate(ROWS, **named, **{WORD: past}), model.generate(ROWS, **named))
    assert "LayoutError" in store.declined
    assert cache.stats()["tiers"]["host"]["records"] == 0
    usual(warm(cache, model), model)
