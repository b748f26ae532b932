import json

import pytest
from typer.testing import CliRunner

from vlarl.config.compose import build, compose
from vlarl.config.resolved import dump
from vlarl_cli.main import app

RUN = CliRunner()
NAME = "tiny_metaworld_grpo"


def test_show_is_a_complete_preset(tmp_path):
    done = RUN.invoke(app, ["config", "show", "--preset", NAME, "optim.lr=1e-5"])
    assert done.exit_code == 0
    file = tmp_path / "full.yaml"
    file.write_text(done.stdout)
    assert build(compose(file)) == build(compose(NAME, ["optim.lr=1e-5"]))


def test_show_and_validate_know_presets_of_sft():
    done = RUN.invoke(app, ["config", "show", "--preset", "tiny_metaworld_sft", "--json"])
    assert "augment" in json.loads(done.stdout)
    assert RUN.invoke(app, ["config", "validate", "tiny_metaworld_sft"]).exit_code == 0


def test_show_says_where_values_come_from():
    args = ["config", "show", "--preset", NAME, "optim.lr=1e-5", "--sources"]
    lines = RUN.invoke(app, args).stdout.splitlines()
    assert "  lr: 1e-05  # cli" in lines
    assert any(line.startswith("  group_size: 8  # base/grpo.yaml:") for line in lines)
    assert "  grad_clip: 1.0  # default" in lines
    data = json.loads(RUN.invoke(app, [*args, "--json"]).stdout)
    assert data["config"]["optim"]["lr"] == 1e-5
    assert data["sources"]["optim.lr"] == "cli"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", "optim.lrr: unknown key; did you mean 'optim.lr'? (cli)"),
        ("algo.group_size=7", "rollout.episodes (96) must be a multiple of 7"),
        ("env.name=metawrld", "no env named 'metawrld'; did you mean 'metaworld'? (cli)"),
        ("optim.lr", "'optim.lr': expected KEY=VALUE"),
    ],
)
def test_a_wrong_override_is_exit_2(override, message):
    done = RUN.invoke(app, ["config", "show", "--preset", NAME, override])
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.startswith("error: ")


def test_validate_checks_every_file_and_reports_every_problem(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text(f"extends: {NAME}\noptim: {{lr: 1e-5}}\n")
    (tmp_path / "bad.yaml").write_text(f"extends: {NAME}\noptim:\n  lrr: 1\nsedd: 2\n")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    files = ["good.yaml", "bad.yaml", "broken.yaml", "none.yaml"]
    done = RUN.invoke(app, ["config", "validate", *files])
    assert (done.exit_code, done.stdout) == (2, "ok  good.yaml\n")
    lines = done.stderr.splitlines()
    assert lines[0] == "error: 4 problems:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "bad.yaml",
        "bad.yaml",
        "broken.yaml",
        "none.yaml",
    ]
    done = RUN.invoke(app, ["config", "validate", *files, "--json"])
    rows = json.loads(done.stdout)
    assert [row["ok"] for row in rows] == [True, False, False, False]
    assert done.exit_code == 2
    assert RUN.invoke(app, ["config", "validate", "good.yaml", "-q"]).stdout == "good.yaml\n"


def test_a_preset_of_the_other_command_is_named(tmp_path):
    def error_of(command, preset):
        done = CliRunner().invoke(app, [command, "--preset", preset, "--dry-run"])
        assert done.exit_code == 2
        return done.stderr.strip()

    assert error_of("train", "tiny_metaworld_sft") == (
        "error: tiny_metaworld_sft is a preset of `vlarl sft`; "
        "run: vlarl sft --preset tiny_metaworld_sft"
    )
    assert "vlarl train --preset tiny_metaworld_grpo" in error_of("sft", "tiny_metaworld_grpo")
    (tmp_path / "preset").write_text("name: x\n")
    assert "a preset's file ends in .yaml" in error_of("train", str(tmp_path / "preset"))


def test_schema_knows_every_plug_in_and_asks_for_nothing():
    schema = json.loads(RUN.invoke(app, ["config", "schema"]).stdout)
    assert {"extends", "env", "policy", "algo", "optim"} <= set(schema["properties"])
    assert {"GrpoConfig", "PpoConfig", "MetaWorldConfig", "OftConfig"} <= set(schema["$defs"])
    assert not any("required" in part for part in (schema, *schema["$defs"].values()))
    lr = schema["$defs"]["OptimSection"]["properties"]["lr"]
    assert lr["description"] == "AdamW learning rate of the actor."


def test_diff_compares_two_runs(tmp_path):
    for run, override in (("a", "optim.lr=1e-5"), ("b", "optim.lr=1e-4")):
        (tmp_path / run).mkdir()
        composed = compose(NAME, [override])
        (tmp_path / run / "config.json").write_text(dump(build(composed), composed.sources))
    done = RUN.invoke(app, ["config", "diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"])
    assert json.loads(done.stdout) == [{"key": "optim.lr", "a": 1e-5, "b": 1e-4}]
    done = RUN.invoke(app, ["config", "diff", str(tmp_path / "a"), str(tmp_path)])
    assert done.exit_code == 2
    assert "is " in done.stderr
    assert "a run directory?" in done.stderr
