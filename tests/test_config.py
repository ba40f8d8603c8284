"""Run files, arguments and settings: what is understood, what is refused, and how that is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from snugtune import api, cli
from snugtune.config import EVERYDAY, RunConfig, differences, known_names, show_config
from snugtune.errors import UsageError
from snugtune.runfile import load_config, parse_settings

BOTH = {"model": "m", "data": "d.csv"}


def test_later_sources_win_over_earlier_ones(tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text("model: {name: m}\ndata: {train: d.csv}\ntraining: {epochs: 1, seed: 1, batch_size: 4}\n")
    config = load_config(
        run, everyday={"seed": 2, "batch_size": 8, "data": None}, settings={"training.batch_size": 16}
    )
    assert (config.training.epochs, config.training.seed, config.training.batch_size) == (1, 2, 16)
    assert config.data.train == "d.csv"


def test_the_defaults_are_those_of_the_guide():
    training = load_config(everyday=BOTH).training
    assert (training.optimizer, training.learning_rate, training.epochs) == ("adamw", 5e-5, 3)
    assert (training.batch_size, load_config(everyday=BOTH).data.max_length) == (32, 128)
    assert (training.warmup_fraction, training.schedule, training.weight_decay) == (0.06, "linear", 0.01)
    assert training.clip_grad_norm == 1.0


def test_the_shown_configuration_is_a_run_file_that_means_the_same(tmp_path):
    config = load_config(
        everyday={**BOTH, "budget": "11GB", "checkpointed_layers": "all", "label_column": ["a", "b"]},
        settings=parse_settings(["training.class_weights={是: 2, no: 0.5}", "data.text_column='1'"]),
    )
    text = show_config(config)
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    assert load_config(tmp_path / "run.yaml") == config
    assert "# Samples behind one update" in text
    assert set(known_names()) <= set(_dotted(yaml.safe_load(text)))


def _dotted(values: dict, prefix: str = "") -> list[str]:
    return [
        name
        for key, value in values.items()
        for name in [prefix + key, *(_dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else [])]
    ]


def test_every_setting_has_a_help_text():
    models = [
        RunConfig,
        *(f.annotation for f in RunConfig.model_fields.values() if hasattr(f.annotation, "model_fields")),
    ]
    for model in models:
        for name, field in model.model_fields.items():
            assert field.description or hasattr(field.annotation, "model_fields"), f"{model.__name__}.{name}"


def test_everyday_names_are_the_same_in_the_shell_in_python_and_in_the_table():
    assert set(api.Everyday.__annotations__) == set(EVERYDAY)
    assert set(EVERYDAY.values()) <= set(known_names())
    flags = set(cli.train.__annotations__) - {
        "context",
        "run_file",
        "set_",
        "print_config",
        "quiet",
        "verbose",
        "continue_anyway",
        "return",
    }
    assert flags == set(EVERYDAY)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"training.learningrate": 1}, "did you mean training.learning_rate?"),
        ({"learning_rate": 1}, "did you mean training.learning_rate?"),
        ({"model.naem": "x"}, "did you mean model.name?"),
        ({"training.checkpointedlayers": 1}, "did you mean training.checkpointed_layers?"),
        ({"zzz": 1}, "--print-config"),
    ],
)
def test_an_unknown_setting_gets_the_nearest_known_one(settings, part):
    with pytest.raises(UsageError, match="does not exist") as caught:
        load_config(everyday=BOTH, settings=settings)
    assert part in caught.value.do


def test_a_group_is_no_setting_and_the_settings_in_it_are_named():
    with pytest.raises(UsageError, match="is a group") as caught:
        load_config(everyday=BOTH, settings={"training": 3})
    assert caught.value.do == "such as training.epochs"


def test_an_unknown_argument_of_python_gets_the_nearest_known_one():
    with pytest.raises(UsageError) as caught:
        load_config(everyday={**BOTH, "epoch": 3})
    assert caught.value.do == "did you mean epochs?"


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("training.epochs", 0, "greater than or equal to 1"),
        ("training.epochs", "many", "valid integer"),
        ("training.batch_size", -4, "greater than or equal to 1"),
        ("training.batch_size", 2.5, "fractional"),
        ("training.learning_rate", "fast", "valid number"),
        ("training.learning_rate", 0, "greater than 0"),
        ("training.precision", "fp8", "'fp16'"),
        ("training.checkpointed_layers", "some", "'all'"),
        ("training.checkpointed_layers", -1, "greater than or equal to 0"),
        ("training.class_weights", {"a": -1}, "greater than or equal to 0"),
        ("training.budget", "eleven", "a number and a unit"),
        ("training.budget", "-3 GiB", "a number and a unit"),
        ("training.budget", 11, "a number and a unit"),
        ("data.validation_fraction", 1, "less than 1"),
        ("data.max_length", 0, "greater than or equal to 2"),
        ("model", "bert", "valid dictionary"),
    ],
)
def test_a_value_that_is_not_allowed_is_named_with_the_reason(name, value, why, tmp_path):
    values = yaml.safe_load("model: {name: m}\ndata: {train: d}\ntraining: {seed: 1}\n")
    group, _, leaf = name.partition(".")
    if leaf:
        values[group][leaf] = value
    else:
        values[group] = value
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump(values, sort_keys=False))
    line = next(
        n
        for n, text in enumerate(run.read_text().splitlines(), 1)
        if text.strip().startswith((leaf or name) + ":")
    )
    with pytest.raises(UsageError) as caught:
        load_config(run)
    assert caught.value.what.startswith(f"{run}, line {line}: {name} cannot be ")
    assert why in caught.value.why


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("model: {name: m}\ndata:\n  train: a\n  train: b\n", "line 4: data.train is set twice"),
        ("model:\n  nmae: m\ndata: {train: d}\n", "line 2: the setting 'model.nmae' does not exist"),
        ("- 1\n- 2\n", "has no settings"),
        ("", "has no settings"),
        ("a: [\n", "is not YAML"),
        ("data: {train: d}\n", "model.name is not given"),
        ("model: {name: m}\n", "data.train is not given"),
    ],
)
def test_a_broken_run_file_is_refused_with_its_line(text, part, tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_config(run)
    assert part in caught.value.what


def test_a_run_file_that_is_not_there_or_not_utf8_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot read the run file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "gbk.yaml").write_bytes("model: {name: 模型}".encode("gbk"))
    with pytest.raises(UsageError, match="is not YAML in UTF-8"):
        load_config(tmp_path / "gbk.yaml")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_run_file_that_windows_wrote_is_read(encoding, tmp_path):
    text = show_config(load_config(everyday={**BOTH, "text_column": "评语"})).replace("\n", "\r\n")
    (tmp_path / "run.yaml").write_bytes(text.encode(encoding))
    assert load_config(tmp_path / "run.yaml").data.text_column == "评语"


@pytest.mark.parametrize(
    ("text", "value"), [("|", "|"), (",", ","), (";", ";"), ("'|'", "|"), ("~", None), ("", None)]
)
def test_a_separator_on_the_command_line_means_itself(text, value):
    config = load_config(everyday=BOTH, settings=parse_settings([f"data.label_separator={text}"]))
    assert config.data.label_separator == value


@pytest.mark.parametrize("text", ["model.name", "=3", "a=[", ""])
def test_a_set_without_name_and_value_is_refused(text):
    with pytest.raises(UsageError):
        load_config(everyday=BOTH, settings=parse_settings([text]))


def test_numbers_in_scientific_notation_are_numbers_in_files_and_on_the_command_line(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "model: {name: m}\ndata: {train: d}\ntraining: {learning_rate: 3e-5}\n"
    )
    assert load_config(tmp_path / "run.yaml").training.learning_rate == 3e-5
    settings = parse_settings(["training.learning_rate=2e-5"])
    assert load_config(everyday=BOTH, settings=settings).training.learning_rate == 2e-5


def test_the_folder_is_named_after_the_data():
    names = {
        "reviews.csv": "reviews",
        "a/b/news.jsonl": "news",
        "x\\y\\z.tsv": "z",
        "owner/set": "set",
        "dir/": "dir",
    }
    for data, name in names.items():
        assert load_config(everyday={"model": "m", "data": data}).folder == Path("runs") / name
    assert load_config(everyday={**BOTH, "output": "o"}).folder == Path("o")


def test_settings_that_do_not_change_what_is_learnt_are_no_difference():
    how = {"training.passes": 4, "training.checkpointed_layers": "all", "training.budget": "6 GiB"}
    one = load_config(everyday=BOTH)
    assert differences(one, load_config(everyday=BOTH, settings={**how, "checkpoints.keep_last": 5})) == []


def test_differences_name_the_settings_and_leave_the_folder_aside():
    one = load_config(everyday={**BOTH, "output": "a"})
    other = load_config(
        everyday={**BOTH, "output": "b", "seed": 7}, settings={"training.class_weights": {"a": 1}}
    )
    assert differences(one, one) == []
    assert differences(one, other) == ["training.class_weights", "training.seed"]
