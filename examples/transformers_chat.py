"""A conversation with SmolLM2 through transformers: the second turn computes only what the first has not."""

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvcache
from kvcache.connector.transformers import PrefixStore
from kvcache.engine.checkpoint import resolve_model  # SmolLM2 as its package ships it; any directory or hub name does

path = resolve_model("smollm2")
tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16")
with kvcache.open() as cache:
    store, chat = PrefixStore(cache, model), []
    for question in ("What is a prefix, in one sentence?", "And a suffix?"):
        chat.append({"role": "user", "content": question})
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = store.generate(**ids, max_new_tokens=32, do_sample=False)[0, ids["input_ids"].shape[1] :]
        chat.append({"role": "assistant", "content": tokenizer.decode(out, skip_special_tokens=True)})
        print(f"{store.reused} of {ids['input_ids'].shape[1]} tokens were there already: {chat[-1]['content']}")
