import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dew.config import Run, Scoring, check_keys, make_run, parse_yaml, read_run, to_yaml
from dew.errors import ConfigError, DewError


# ---- YAML as people mean it --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E-6", 1e-6),
        ("5.0e-7", 5e-7),
        ("-.5", -0.5),
        ("12", 12),
        ("no", "no"),
        ("on", "on"),
        ("3:20", "3:20"),
        ("true", True),
        ("0o17", "0o17"),
        ("2024-01-01", "2024-01-01"),
        ("null", None),
        ("'1e-6'", "1e-6"),
        (".inf", math.inf),
    ],
)
def test_scalars(text, value):
    parsed = parse_yaml(f"key: {text}")["key"]
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\na: 2", "a stands twice"),
        ("a: [1", "not YAML in line"),
        ("- 1\n- 2", "got a list"),
        ("1: 2", "expected lines such as"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
        ("a: !!python/name:os.system", "not YAML"),
    ],
)
def test_bad_yaml_is_one_clear_error(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_yaml(text)


@given(st.text(max_size=200))
def test_any_text_is_settings_or_one_clear_error(text):
    with contextlib.suppress(DewError):
        assert isinstance(parse_yaml(text), dict)


# ---- a run -------------------------------------------------------------------------------------
def test_keys_are_sorted_into_ours_and_the_engines():
    run = make_run({"task": "countdown", "problems": 8, "learning_rate": 1e-4, "scores": {"k": 4}})
    assert run == Run(task="countdown", problems=8, scores=Scoring(k=4), settings={"learning_rate": 1e-4})
    assert make_run({"scores": True}).scores == Scoring()
    assert make_run({"scores": False}).scores is None


def test_a_run_survives_its_file(tmp_path):
    run = make_run(
        {
            "task": "countdown",
            "task_settings": {"numbers": 3},
            "scores": {"problems": 16},
            "learning_rate": 1e-6,
            "word": "no",
            "number_as_text": "1e-6",
            "clip": (0.2, 0.28),
        }
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(run, header=["dew 0.1.0"]))
    again = read_run(path)
    assert again.to_dict() == {**run.to_dict(), "clip": [0.2, 0.28]}
    assert path.read_text().startswith("# dew 0.1.0\n")
    assert read_run(path, {"problems": 3}).problems == 3


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"engine": "openrlhf"}, "trl, verl"),
        ({"problems": 0}, "At least one problem"),
        ({"problems": "many"}, "problems: expected int, got 'many'"),
        ({"task": 3, "task_settings": []}, "task: expected str, got 3"),
        ({"scores": {"kk": 3}}, "scores.kk is not known. Did you mean k"),
        ({"scores": 5}, "scores: expected true, false"),
    ],
)
def test_bad_runs_are_answered_with_advice(keys, says):
    with pytest.raises(ConfigError, match=says):
        make_run(keys, source="x.yaml")


def test_unknown_keys_name_the_file_and_the_nearest_key():
    with pytest.raises(ConfigError) as error:
        check_keys(["learnin_rate", "zzz"], ["learning_rate"], source="x.yaml")
    assert str(error.value).startswith("x.yaml:\n- learnin_rate is not a setting. Did you mean learning_rate?")
    assert "zzz" in str(error.value)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        read_run(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_run(tmp_path)
