import json

import pytest
from typer.testing import CliRunner

from vlarl.config import presets
from vlarl_cli.main import app
from vlarl_cli.options import complete_preset

RUN = CliRunner()
NAME = "tiny_metaworld_grpo"


def test_list_shows_what_can_be_run():
    done = RUN.invoke(app, ["presets", "list"])
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["name", *presets.names()]


def test_list_filters_and_answers_in_json():
    words = ["presets", "list", "--algo", "ppo", "--env", "metaworld", "--json"]
    rows = json.loads(RUN.invoke(app, words).stdout)
    assert [row["name"] for row in rows] == ["tiny_metaworld_ppo"]
    assert (rows[0]["env"], rows[0]["command"]) == ("metaworld", "train")
    assert rows[0]["description"].startswith("PPO ")
    assert RUN.invoke(app, ["presets", "list", "-q"]).stdout.split() == presets.names()


def test_list_knows_what_it_can_filter_by():
    done = RUN.invoke(app, ["presets", "list", "--env", "metawrld"])
    assert done.exit_code == 2
    assert "env.name: no env named 'metawrld'; did you mean 'metaworld'?" in done.stderr


def test_show_prints_the_file():
    assert RUN.invoke(app, ["presets", "show", NAME]).stdout == presets.read(NAME)


def test_an_unknown_preset_is_exit_2_with_a_suggestion():
    done = RUN.invoke(app, ["presets", "show", "tiny_metaworld_grop"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "did you mean 'tiny_metaworld_grpo'" in done.stderr


def test_copy_prints_the_path_and_does_not_overwrite(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = RUN.invoke(app, ["presets", "copy", NAME, "mine.yaml"])
    assert (done.exit_code, done.stdout) == (0, "mine.yaml\n")
    assert done.stderr == "edit it, then: vlarl train --preset mine.yaml\n"
    done = RUN.invoke(app, ["presets", "copy", "tiny_metaworld_sft"])
    assert done.stderr == "edit it, then: vlarl sft --preset tiny_metaworld_sft.yaml\n"
    (tmp_path / "mine.yaml").write_text("# mine\n")
    done = RUN.invoke(app, ["presets", "copy", NAME, "mine.yaml"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: mine.yaml exists already")
    assert (tmp_path / "mine.yaml").read_text() == "# mine\n"


@pytest.mark.parametrize("flag", ["--json", "-q"])
def test_copy_for_scripts(tmp_path, monkeypatch, flag):
    monkeypatch.chdir(tmp_path)
    out = RUN.invoke(app, ["presets", "copy", NAME, flag]).stdout
    file = json.loads(out)["path"] if flag == "--json" else out.strip()
    assert (tmp_path / file).read_text() == presets.read(NAME)


def test_diff_names_what_differs():
    done = RUN.invoke(app, ["presets", "diff", NAME, "tiny_metaworld_ppo", "--json"])
    rows = {row["key"]: (row["a"], row["b"]) for row in json.loads(done.stdout)}
    assert rows["algo.name"] == ("grpo", "ppo")
    assert "env.name" not in rows
    assert RUN.invoke(app, ["presets", "diff", NAME, NAME, "-q"]).stdout == ""


def test_names_complete():
    assert complete_preset("tiny_metaworld_g") == [NAME]
