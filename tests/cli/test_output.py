import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from vlarl.config.compose import parse_overrides
from vlarl.errors import ConfigError
from vlarl_cli.options import examples, merge_overrides
from vlarl_cli.output import Output, format_table, to_json

ROWS = [{"name": "a", "k": 1, "note": None}, {"name": "bcd", "k": 10, "note": "x"}]


def test_a_table_is_text_json_or_ids(capsys):
    Output().table(ROWS, ident="name")
    assert capsys.readouterr().out == "name   k  note\na      1\nbcd   10  x\n"
    Output(json=True).table(ROWS, ident="name")
    assert json.loads(capsys.readouterr().out) == ROWS
    Output(quiet=True).table(ROWS, ident="name")
    assert capsys.readouterr().out == "a\nbcd\n"


def test_no_rows_is_said_to_people_only(capsys):
    assert format_table([]) == "(none)"
    Output(json=True).table([], ident="name")
    Output(quiet=True).table([], ident="name")
    assert capsys.readouterr().out == "[]\n"


def test_hints_are_talk(capsys):
    Output().hint("next")
    Output(json=True).hint("next")
    Output(quiet=True).hint("dropped")
    Output(quiet=True).warn("kept")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "next\nnext\nwarning: kept\n"


def test_json_and_quiet_exclude_each_other():
    with pytest.raises(ConfigError, match="exclude each other"):
        Output(json=True, quiet=True)


def test_json_holds_only_what_json_has():
    @dataclass
    class Point:
        x: float
        where: Path

    data = {"p": Point(float("nan"), Path("a/b")), "t": (1, float("inf")), 3: "ü"}
    assert json.loads(to_json(data)) == {"p": {"x": None, "where": "a/b"}, "t": [1, None], "3": "ü"}


def test_sugar_flags_are_overrides():
    assert merge_overrides(["a=1"], seed=3, max_steps=None, rollout__temperature=0.5) == [
        "a=1",
        "seed=3",
        "rollout.temperature=0.5",
    ]
    assert merge_overrides(None) == []


def test_words_and_paths_of_flags_stay_words():
    given = merge_overrides(None, name="7", run_dir=Path("a: #b"))
    assert parse_overrides(given)["name"].value == "7"
    assert parse_overrides(given)["run_dir"].value == "a: #b"


def test_brackets_in_examples_are_no_markup():
    assert examples("vlarl x 'a=[b]'") == "Examples:\n\n$ vlarl x 'a=\\[b]'"
