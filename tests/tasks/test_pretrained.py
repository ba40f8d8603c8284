"""Models in Hugging Face format: what is loaded, what is refused, and what is left for people to use."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from snugtune import tasks
from snugtune.config import ModelSettings, RunConfig
from snugtune.data.batching import Plan, Updates
from snugtune.errors import ModelError
from snugtune.step import Choices, Hyperparameters, Step
from snugtune.tasks.pretrained import load_config, load_model, load_tokenizer, token_limit

TEXTS = ["the film was good", "a very boring book and it was not fun at all", "great", "awful , we vote no !"]
LONG = "the film was very good and " * 30


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may break."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def load(folder: Path, labels: int = 3, **settings: Any) -> Any:
    from transformers import AutoModelForSequenceClassification

    settings_ = ModelSettings(name=str(folder), **settings)
    return load_model(AutoModelForSequenceClassification, settings_, num_labels=labels)


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refused(folder: Path, **settings: Any) -> ModelError:
    with pytest.raises(ModelError) as raised:
        load(folder, **settings)
    assert str(folder) in raised.value.what
    return raised.value


# Loading


def test_the_body_has_the_saved_weights_in_fp32_and_the_head_is_new(folder):
    model, saved = load(folder), load_file(folder / "model.safetensors")
    body = model.bert.state_dict()
    assert all(torch.equal(body[name], saved[name]) for name in saved)
    assert model.classifier.weight.shape == (3, 32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_weights_saved_in_fp16_are_loaded_as_fp32(folder):
    saved = {name: value.half() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, dtype="float16")
    model = load(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    name = "embeddings.word_embeddings.weight"
    assert torch.equal(model.bert.state_dict()[name], saved[name].float())


def test_a_head_for_another_number_of_classes_is_replaced_and_one_that_fits_is_kept(folder, tmp_path):
    head = load(folder, labels=5)
    head.save_pretrained(tmp_path / "five")
    shutil.copy(folder / "vocab.txt", tmp_path / "five")
    three, five = load(tmp_path / "five", labels=3), load(tmp_path / "five", labels=5)
    assert three.classifier.weight.shape == (3, 32)
    assert torch.isfinite(three.classifier.weight).all()
    assert torch.equal(five.classifier.weight, head.classifier.weight)
    for name, value in head.bert.state_dict().items():
        assert torch.equal(three.bert.state_dict()[name], value)


def test_a_bin_file_is_refused_and_on_request_gives_equal_weights(folder):
    expected = load(folder).bert.state_dict()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "model.allow_pickle=true" in refused(folder).do
    found = load(folder, allow_pickle=True).bert.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class Harmful:
    """Something that writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_bin_file_never_runs_code(folder, tmp_path):
    torch.save({"x": Harmful(tmp_path / "ran")}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(folder, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "more",
    [np.float64(0.5), np.random.get_state(), argparse.Namespace(lr=0.1)],
    ids=lambda more: str(type(more)),
)
def test_a_bin_file_with_objects_beside_its_tensors_is_explained_and_never_trusted(more, folder):
    """C097: what older programs saved is not read by switching the check off."""
    torch.save({**load_file(folder / "model.safetensors"), "more": more}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    error = refused(folder, allow_pickle=True)
    assert re.search(r"Python objects \((numpy|argparse)[\w.]+\)", error.why)
    assert "safe_globals" in error.do
    assert "False" not in str(error)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hidden_size": 64}, "is of another size"),
        ({"intermediate_size": 32}, "is of another size"),
        ({"vocab_size": 50}, "embeddings.word_embeddings.weight is of another size (1 such"),
        ({"num_hidden_layers": 3}, "encoder.layer.2"),
    ],
    ids=str,
)
def test_a_body_that_would_be_random_numbers_is_refused(change, why, folder):
    change_config(folder, **change)
    error = refused(folder)
    assert "does not have the weights that its config.json describes" in error.what
    assert why in error.why
    assert "config.json" in error.do


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "config is a list": (lambda folder: (folder / "config.json").write_text("[]"), "config.json"),
    "config of a wrong type": (lambda folder: change_config(folder, hidden_size="wide"), "config.json"),
    "config of an unknown model": (lambda folder: change_config(folder, model_type="nosuch"), "config.json"),
    "config of an image model": (lambda folder: change_config(folder, model_type="vit"), "config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "only .bin files"),
    "cut weights": (lambda folder: cut(folder / "model.safetensors"), "fetch model.safetensors again"),
    "empty weights": (
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        "fetch model.safetensors again",
    ),
    "a pointer to the weights": (
        lambda folder: (folder / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1"
        ),
        "Git LFS pointer",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_with_what_to_do(case, folder):
    break_it, advice = BROKEN[case]
    break_it(folder)
    assert advice in refused(folder).do


def test_an_empty_folder_and_one_that_is_not_there_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "absent"):
        refused(tmp_path / name)
        with pytest.raises(ModelError):
            load_config(ModelSettings(name=str(tmp_path / name)))
        with pytest.raises(ModelError):
            load_tokenizer(ModelSettings(name=str(tmp_path / name)))


def test_a_model_that_needs_its_own_code_is_refused_and_no_code_runs(folder, tmp_path):
    change_config(
        folder,
        model_type="mine",
        auto_map={"AutoConfig": "mine.Config", "AutoModelForSequenceClassification": "mine.Model"},
    )
    (folder / "mine.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    settings = ModelSettings(name=str(folder))
    for attempt in (lambda: load(folder), lambda: load_config(settings)):
        with pytest.raises(ModelError) as raised:
            attempt()
        assert "--set model.trust_remote_code=true" in raised.value.do
    assert not (tmp_path / "ran").exists()


# Tokenizers


@pytest.mark.parametrize("kind", ["BertConfig", "RobertaConfig", "GPT2Config", "T5Config", "DebertaV2Config"])
def test_a_folder_without_a_vocabulary_is_refused(kind, tmp_path):
    """transformers itself makes a tokenizer of a few special tokens, to which every text is the same."""
    import transformers

    getattr(transformers, kind)().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(ModelSettings(name=str(tmp_path)))


def save_word_tokenizer(folder: Path, **special: str) -> None:
    """A tokenizer of whole words, as language models have it: nothing around the text, no padding token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*special.values(), *" ".join([*TEXTS, LONG]).split()]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token=special.get("unk_token")))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = ["input_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=raw, model_input_names=names, **special).save_pretrained(folder)


def test_a_tokenizer_without_any_token_to_pad_with_is_refused(tmp_path):
    save_word_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="has no padding token") as raised:
        load_tokenizer(ModelSettings(name=str(tmp_path)))
    assert "pad_token" in raised.value.do


@pytest.mark.parametrize(
    ("special", "pad"),
    [
        ({"unk_token": "<unk>"}, "<unk>"),
        ({"unk_token": "<unk>", "eos_token": "<end>"}, "<end>"),
        ({"unk_token": "<unk>", "eos_token": "<end>", "pad_token": "<pad>"}, "<pad>"),
    ],
)
def test_a_missing_padding_token_is_replaced(special, pad, tmp_path):
    save_word_tokenizer(tmp_path, **special)
    assert load_tokenizer(ModelSettings(name=str(tmp_path))).pad_token == pad


class Limits:
    def __init__(self, tokens: int) -> None:
        self.model_max_length = tokens


@pytest.mark.parametrize(
    ("kind", "values", "tokens", "limit"),
    [
        ("BertConfig", {"max_position_embeddings": 512}, 10**30, 512),
        ("BertConfig", {"max_position_embeddings": 512}, 256, 256),
        ("RobertaConfig", {"max_position_embeddings": 514}, 10**30, 512),
        ("XLMRobertaConfig", {"max_position_embeddings": 66}, 64, 64),
        ("MPNetConfig", {"max_position_embeddings": 66}, 66, 64),
        ("GPT2Config", {"n_positions": 100}, 10**30, 100),
        ("T5Config", {}, 512, 512),
        ("T5Config", {}, 10**30, 10**6),
        ("XLNetConfig", {}, 10**30, 10**6),
    ],
    ids=str,
)
def test_the_longest_text_follows_from_tokenizer_and_model(kind, values, tokens, limit):
    import transformers

    assert token_limit(Limits(tokens), getattr(transformers, kind)(**values)) == limit


# From a folder to a folder


def write_data(path: Path, names: tuple[str, ...] = ("好评", "bad, or so")) -> dict[str, str]:
    cells = [(text, names[number % len(names)]) for number, text in enumerate(TEXTS * 5)]
    cells.append((LONG, names[0]))
    lines = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in cells)
    (path / "data.jsonl").write_text(lines, encoding="utf-8")
    return {"train": str(path / "data.jsonl")}


def prepare(folder: Path, data: dict[str, Any], **settings: Any) -> tasks.Prepared:
    config = {"model": {"name": str(folder)}, "data": data, **settings}
    return tasks.prepare(RunConfig.model_validate(config))


def make_step(task: tasks.Task, **choices: Any) -> Step:
    return Step(task, Choices(**choices), Hyperparameters(), device=torch.device("cpu"))


def train(prepared: tasks.Prepared, updates: int = 3, **choices: Any) -> Step:
    step = make_step(prepared.task, **choices)
    plan = Plan(batch_size=8, passes=2)
    batches = Updates(prepared.train, prepared.task.collate, plan=plan, seed=0, epochs=updates)
    for number in range(updates):
        assert step.update(batches[number], number=number, learning_rate=1e-3).applied
    return step


def answers(step: Step, folder: Path, texts: list[str]) -> torch.Tensor:
    """The step's own logits for texts, [texts, classes], tokenised as people will."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(texts, truncation=True, padding=True, return_tensors="pt")
    return step.evaluate(dict(batch))["logits"]


@pytest.mark.parametrize("kind", ["single", "multi", "number"])
def test_the_saved_folder_gives_the_same_answers_in_a_pipeline(kind, tiny_model, tmp_path):
    from transformers import pipeline

    data: dict[str, Any] = write_data(tmp_path)
    names = ["bad, or so", "好评"]
    if kind == "multi":
        data = write_data(tmp_path, ("好评", "", "bad, or so|好评")) | {"label_separator": "|"}
    if kind == "number":
        data, names = write_data(tmp_path, (0.5, -1.25)), ["value"]  # type: ignore[arg-type]
    prepared = prepare(tiny_model, data)
    step = train(prepared)
    prepared.task.save(step.model, tmp_path / "out")

    ask = pipeline("text-classification", str(tmp_path / "out"), top_k=None)
    logits = answers(step, tmp_path / "out", TEXTS)
    scores = {"single": logits.softmax(-1), "multi": logits.sigmoid(), "number": logits}[kind]
    for text, expected in zip(TEXTS, scores, strict=True):
        found = {answer["label"]: answer["score"] for answer in ask([text])[0]}
        assert found == pytest.approx(dict(zip(names, expected.tolist(), strict=True)), abs=1e-5)


def test_long_texts_are_cut_off_in_use_where_they_were_in_training(tiny_model, tmp_path):
    from transformers import pipeline

    prepared = prepare(tiny_model, {**write_data(tmp_path), "max_length": 9})
    step = train(prepared)
    prepared.task.save(step.model, tmp_path / "out")
    ask = pipeline("text-classification", str(tmp_path / "out"), top_k=None)
    assert int(prepared.train.lengths.max()) == 9
    cut_off, short = ask([LONG, "the film was very good and the"], truncation=True)
    assert cut_off == short


def test_everybody_may_read_the_saved_files_and_the_names_of_the_labels_survive(tiny_model, tmp_path):
    prepared = prepare(tiny_model, write_data(tmp_path))
    before = os.umask(0o022)
    try:
        prepared.task.save(make_step(prepared.task).model, tmp_path / "out")
    finally:
        os.umask(before)
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert set(files) >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert set(files.values()) == {0o644}
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pkl", ".pickle"))]
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["id2label"] == {"0": "bad, or so", "1": "好评"}
    assert config["label2id"] == {"bad, or so": 0, "好评": 1}
    assert config["problem_type"] == "single_label_classification"


def test_the_saved_folder_can_be_trained_further(tiny_model, tmp_path):
    prepared = prepare(tiny_model, write_data(tmp_path))
    step = train(prepared)
    prepared.task.save(step.model, tmp_path / "out")
    again = make_step(prepare(tmp_path / "out", write_data(tmp_path)).task)
    for (name, one), other in zip(step.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other), name


def save_roberta(folder: Path) -> None:
    from transformers import RobertaConfig, RobertaModel

    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    save_word_tokenizer(folder, **special)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = RobertaConfig(vocab_size=60, max_position_embeddings=66, pad_token_id=1, **shape)
    RobertaModel(config).save_pretrained(folder)


@pytest.mark.parametrize("tokenizer_limit", [64, None])
def test_a_model_that_counts_positions_after_the_padding_stays_in_range(tokenizer_limit, tmp_path):
    save_roberta(tmp_path)
    if tokenizer_limit is not None:
        path = tmp_path / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": tokenizer_limit}))
    prepared = prepare(tmp_path, {**write_data(tmp_path), "max_length": 512})
    assert prepared.facts["max_length"] == 64
    longest = max(prepared.train.lengths.max(), prepared.validation.lengths.max())
    assert longest == 64
    step = train(prepared, updates=3)
    batch = prepared.task.example_batch(2, 64)
    assert step.evaluate(batch)["logits"].shape == (2, 2)


# Decoders


def save_gpt2(folder: Path, **values: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    save_word_tokenizer(folder, unk_token="<unk>", eos_token="<end>")
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"vocab_size": 60, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**{**shape, **dropout, "bos_token_id": 1, "eos_token_id": 1, **values})
    GPT2LMHeadModel(config).save_pretrained(folder)


@pytest.mark.parametrize("config_pad", [None, 7])
@pytest.mark.parametrize("layers", [0, "all"])
def test_a_language_model_without_a_padding_token_classifies_and_padding_changes_nothing(
    config_pad, layers, tmp_path
):
    save_gpt2(tmp_path, pad_token_id=config_pad)
    prepared = prepare(tmp_path, {**write_data(tmp_path), "max_length": 20})
    step = train(prepared, checkpointed_layers=layers)
    assert step.checkpointed == (2 if layers else 0)
    rows = prepared.train.rows.__getitems__(list(range(8)))
    together = step.evaluate(prepared.task.collate(rows))["logits"]
    alone = torch.cat([step.evaluate(prepared.task.collate([row]))["logits"] for row in rows])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_a_saved_language_model_answers_as_its_step(tmp_path):
    from transformers import pipeline

    save_gpt2(tmp_path)
    prepared = prepare(tmp_path, {**write_data(tmp_path), "max_length": 20})
    step = train(prepared)
    prepared.task.save(step.model, tmp_path / "out")
    assert step.model.config.use_cache is True  # as it began
    assert json.loads((tmp_path / "out" / "config.json").read_text())["use_cache"] is True
    ask = pipeline("text-classification", str(tmp_path / "out"), top_k=None)
    expected = answers(step, tmp_path / "out", TEXTS).softmax(-1)
    found = [{answer["label"]: answer["score"] for answer in each} for each in ask(TEXTS, batch_size=4)]
    for one, other in zip(found, expected.tolist(), strict=True):
        assert one == pytest.approx(dict(zip(["bad, or so", "好评"], other, strict=True)), abs=1e-5)


def test_a_model_that_answers_at_the_end_token_trains_and_plans(tmp_path):
    from tokenizers import processors
    from transformers import AutoTokenizer, T5Config, T5ForSequenceClassification

    save_word_tokenizer(tmp_path, pad_token="<pad>", unk_token="<unk>", eos_token="</s>")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ending = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.eos_token_id)]
    )
    tokenizer.backend_tokenizer.post_processor = ending
    tokenizer.save_pretrained(tmp_path)
    shape = {"vocab_size": 60, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = T5Config(**shape, decoder_start_token_id=0, eos_token_id=tokenizer.eos_token_id)
    T5ForSequenceClassification(config).save_pretrained(tmp_path)
    prepared = prepare(tmp_path, {**write_data(tmp_path), "max_length": 12})
    step = train(prepared, checkpointed_layers="all")
    assert step.checkpointed == 4
    assert step.update([prepared.task.example_batch(3, 12)], number=9, learning_rate=1e-3).applied


def test_a_real_model_has_the_weights_of_its_file(minilm):
    model, saved = load(minilm), load_file(minilm / "model.safetensors")
    body = model.bert.state_dict()
    name = "encoder.layer.5.output.dense.weight"
    assert torch.equal(body[name], saved[name].float())
    assert len(body) >= 100
