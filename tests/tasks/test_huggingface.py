from __future__ import annotations

import json
import sys

import pytest
import torch

from sparsam.recipe import Recipe
from sparsam.tasks.huggingface import FolderModel


def test_no_model_there(tmp_path):
    with pytest.raises(
        ValueError, match=r"x: expected a Hugging Face model folder, found nothing there\. Give the path"
    ):
        FolderModel(tmp_path / "x")
    with pytest.raises(ValueError, match=r"found no config\.json in it\. .*models are not downloaded\."):
        FolderModel(tmp_path)


def test_without_transformers(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"expected the package transformers .* pip install 'sparsam\[hf\]'"):
        FolderModel(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama of two small layers with a byte-level tokenizer, as `save_pretrained` writes them."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "<end>"])}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=256,
        eos_token_id=256,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.integration
def test_a_folder_is_a_task(folder, tmp_path):
    (tmp_path / "a.txt").write_text("the quick brown fox " * 20)
    (tmp_path / "b.txt").write_text("jumps over " * 10)
    recipe = Recipe.model_validate(
        {"version": 1, "model": str(folder), "data": {"path": str(tmp_path)}, "training": {"context": 32}}
    )
    task = recipe.task()
    assert task.corpus.train[-1] == 256
    assert task.corpus.bytes_per_token == pytest.approx(1, abs=0.02)
    model = task.build_model()
    assert model.training
    assert model(torch.zeros(2, 8, dtype=torch.int64)).shape == (2, 8, 257)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert recipe.starts_trained


@pytest.mark.integration
def test_a_context_that_the_model_has_not(folder):
    recipe = Recipe.model_validate({"version": 1, "model": str(folder), "training": {"context": 65}})
    with pytest.raises(ValueError, match=r"expected training\.context of at most 64, got 65\. Set less\."):
        recipe.task()


@pytest.mark.integration
def test_a_folder_of_something_else(folder, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match=r"expected a tokenizer, it does not load: \w+: ") as error:
        FolderModel(tmp_path)
    assert "\n" not in str(error.value)
