"""Models of the real ``transformers`` that follow a job: small ones with random weights, as they are made and used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reading_job import job_with_readers, reader_of

import workers
from kvstore import UsageError
from kvstore.client import DistStore

pytestmark = pytest.mark.release


@pytest.fixture(autouse=True)
def _installed() -> None:
    pytest.importorskip("transformers", reason="not installed: transformers (extra huggingface)")


TOKENS = torch.arange(12).reshape(2, 6)


def model_of(seed: int, tied: bool, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=256, num_key_value_heads=2, tie_word_embeddings=tied, **sizes)
    return Qwen2ForCausalLM(config).to(dtype)


def generated(model: Any) -> list[list[int]]:
    return model.generate(TOKENS, max_new_tokens=5, do_sample=False).tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_gives_the_logits_and_the_text_of_the_one_that_is_trained(tied: bool) -> None:
    def work(store: DistStore) -> None:
        trained, mine, half = model_of(0, tied), model_of(1, tied), model_of(2, tied, torch.bfloat16)
        trainer = workers.Trainer(trained.named_parameters(), "adam", {"learning_rate": 1e-2}, kvstore=store)
        with torch.device("meta"):
            empty = model_of(3, tied)
        with reader_of(job) as reader:
            with pytest.raises(UsageError, match=r"embed_tokens\.weight' cannot follow: .* on meta"):
                reader.follow(empty.state_dict())
            full, rounded = reader.follow(mine.state_dict()), reader.follow(half.state_dict())
            for step in range(3):
                trained(input_ids=TOKENS, labels=TOKENS).loss.backward()
                trainer.step()
                trainer.zero_grad()
                assert store.publish() == full.wait_newer() == step + 1
                assert rounded.update()
                assert torch.equal(mine(TOKENS).logits, trained(TOKENS).logits)
                assert generated(mine) == generated(trained)
                states = zip(half.state_dict().values(), trained.state_dict().values(), strict=True)
                assert all(torch.equal(value, wanted.to(torch.bfloat16)) for value, wanted in states)
                assert (mine.lm_head.weight is mine.model.embed_tokens.weight) == tied

    with job_with_readers() as job:
        job.run(work)


@pytest.mark.filterwarnings("ignore")
def test_a_state_of_tied_weights_fits_models_that_tie_them_and_that_do_not_under_other_names() -> None:
    def work(store: DistStore) -> None:
        trained, tied, untied = model_of(0, True), model_of(1, True), torch.nn.ModuleDict({"base": model_of(2, False)})
        with reader_of(job) as reader:
            followers = [
                reader.follow(tied.state_dict()),
                reader.follow(untied.state_dict(), lambda name: name.removeprefix("base.")),
            ]
            for number in (1, 2):
                assert store.publish_state(trained.state_dict()) == number
                for model, follower in zip((tied, untied["base"]), followers, strict=True):
                    assert follower.wait_newer() == number
                    assert torch.equal(model(TOKENS).logits, trained(TOKENS).logits)
                with torch.no_grad():
                    trained.lm_head.weight[7] += 1

    with job_with_readers() as job:
        job.run(work)
