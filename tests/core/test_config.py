import math

import pytest
import yaml

from dew.errors import ConfigError, DewError
from dew.run.config import Run, Scoring, make_run, parse_yaml, read_run, to_yaml


# ---- YAML 1.2 ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1E-6", 1e-6), ("5.0e-7", 5e-7), ("-.5", -0.5), ("12", 12), ("no", "no"), ("on", "on"),
        ("3:20", "3:20"), ("true", True), ("0o17", 15), ("2024-01-01", "2024-01-01"), ("null", None),
        ("'1e-6'", "1e-6"), (".inf", math.inf),
    ],
)  # fmt: skip
def test_scalars(text, value):
    parsed = parse_yaml(f"key: {text}")["key"]
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: 1\na: 2", 'line 3 .*duplicate key "a"'),
        ("b:\n  c: 1\n  c: 2", 'line 3 .*duplicate key "c"'),
        ("a: [1", "line 1"),
        ("- 1\n- 2", "expected `key: value` lines"),
        ("1: 2", "key: value"),
        ("a: &a [1]\nb: *a", "aliases .* are not supported; write each value once"),
        ("a: {b: &b {c: 1}}\nd: {<<: *b}", "aliases"),
        ("!!python/object/apply:os.system ['true']", "line 1"),
        ("a: !!python/name:os.system", "line 1"),
    ],
)
def test_bad_yaml_is_one_clear_error(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_yaml(text)


# ---- a run -------------------------------------------------------------------------------------
def test_keys_are_split_into_dews_own_and_the_engines():
    run = make_run({"task": "countdown", "problems": 8, "learning_rate": 1e-4, "scores": {"k": 4}})
    assert run == Run(task="countdown", problems=8, scores=Scoring(k=4), settings={"learning_rate": 1e-4})
    assert make_run({"task": "countdown", "scores": True}).scores == Scoring()
    assert make_run({"scores": False}).scores is None
    assert "problems" not in make_run({"dataset_name": "some/data"}).to_dict()  # all of the data set is used


def test_a_written_run_reads_back_the_same(tmp_path):
    texts = {"word": "no", "number_as_text": "1e-6", "zeros": "089"}
    texts["long"] = f"{'x' * 70} >\ufeff\u2028x - a"  # ruamel breaks the line there, which adds a space
    values = {"learning_rate": 1e-6, "nested": {"on": ["a: b", "#", {"deep": None}]}, "clip": (0.2, 0.28)}
    keys = {"task": "countdown", "task_settings": {"numbers": 3}, "scores": {"problems": 16}}
    run = make_run({**keys, **values, **texts})
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(run, header=["dew 0.1.0"]))
    assert read_run(path).to_dict() == {**run.to_dict(), "clip": [0.2, 0.28]}
    assert path.read_text().startswith("# dew 0.1.0\n")
    as_yaml_1_1 = yaml.safe_load(path.read_text())  # other tools read YAML 1.1
    assert as_yaml_1_1["learning_rate"] == 1e-6 and as_yaml_1_1["word"] == "no"
    assert read_run(path, {"problems": 3}).problems == 3


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"engine": "openrlhf"}, "trl or verl"),
        ({"problems": 0}, "from 1 to"),
        ({"problems": "x" * 999}, "problems: expected int, got 'x{79}[.]"),
        ({"task": 3, "datasets": [1]}, r"(?s)task: expected str, got 3.*datasets: \[1\]: .* --datasets \[\]"),
        ({"scores": {"kk": 3}}, "scores.kk is not a setting. Did you mean 'scores.k'"),
        ({"scores": 5}, "true, false"),
        ({"learnin_rate": 1}, "learnin_rate is not a setting. Did you mean 'learning_rate'"),
        ({"scores": {"temperature": "hot"}}, "scores.temperature='hot' is not a number"),
        ({"scores": {"temperature": 0, "k": True}}, "(?s)k=True is not a whole number.*temperature=0: must be above 0"),
        ({"scores": True, "dataset_name": "some/data"}, "scores without a task.*Give your data as `task:"),
    ],
)
def test_bad_values_get_advice(keys, says):
    with pytest.raises(ConfigError, match=says):
        make_run(keys, source="x.yaml")


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_run(tmp_path / "none.yaml")
    with pytest.raises(DewError, match="is a folder, not a regular file"):
        read_run(tmp_path)


@pytest.mark.parametrize("name", ["", "A=B", "A\0B"])
def test_names_that_no_environment_takes_are_an_error(name):
    with pytest.raises(ConfigError, match=f"a.yaml:\n.*env: {name!r}: ".replace("\\", r"\\")):
        Run(env={name: 1}, source="a.yaml").set_environment()
