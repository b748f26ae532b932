import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vlarl.result_file import load
from vlarl.results import EpisodeKey, EpisodeResult, EvalResult
from vlarl_cli.main import app


def vlarl(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


def episode(task, trial, success):
    return EpisodeResult(
        task=task,
        trial=trial,
        repeat=0,
        success=success,
        num_steps=5,
        total_reward=float(success),
        num_clipped=0,
        diverged=False,
    )


@pytest.fixture
def save(tmp_path, monkeypatch):
    """save(name, wins, seed=0, **more): 4 trials of task x and 4 of y, the first `wins` of each."""
    monkeypatch.chdir(tmp_path)

    def write(name, wins, *, seed=0, played=range(4), sha="a" * 64, **more):
        plan = tuple(EpisodeKey(task, trial, 0) for task in "xy" for trial in range(4))
        result = EvalResult(
            plan=plan,
            episodes=tuple(
                episode(k.task, k.trial, k.trial < wins) for k in plan if k.trial in played
            ),
            protocol={
                "sampling": {"temperature": 1.6, "seed": seed},
                "env": {"name": "toy", "horizon": 30},
                "plan": {"split": "eval", "start_from_training_trial": 0},
                "checkpoint": {"path": "p", "sha256": sha, "step": None},
                **more,
            },
            groups={"easy": ("x",), "hard": ("y",)},
        )
        result.save(tmp_path / name)
        return name

    return write


def test_one_result_is_shown_with_intervals_and_both_averages(save):
    done = vlarl("report", save("r.json", 3))
    assert done.exit_code == 0
    rows = done.stdout.splitlines()
    assert [row.split("  ")[0] for row in rows] == [
        "task",
        "x",
        "y",
        "[easy]",
        "[hard]",
        "mean of 2 groups",
        "all episodes",
    ]
    assert "6/8" in rows[-1]
    assert "75.0 %" in rows[-1]


def test_markdown_carries_the_protocol(save):
    text = vlarl("report", save("r.json", 3), "--markdown").stdout
    assert "| all episodes | 6/8 |  75.0 % | 40.9 to 92.9 % |" in text
    for line in (
        "- r.json: all 8 planned episodes; plan ",
        "  - sampling: temperature 1.6; seed 0",
        "  - env: name toy; horizon 30",
        "  - plan: split eval; start from training trial 0",
        "  - checkpoint: path p; sha256 aaaaaaaaaaaa",
    ):
        assert f"\n{line}" in text


def test_markdown_shows_what_the_stamp_holds_as_it_comes(save):
    env = {
        "name": "libero",
        "horizon": 30,
        "protocol": "oft",
        "cameras": ["agentview", "wrist"],
        "tasks": ["a", "b", "c", "d"],
        "settle_steps": None,
        "worker_models": 4,
        "facts": {"settle_steps": 10, "caveats": "an old | LIBERO"},
    }
    policy = {"name": "oft", "compat": None, "resolved": {"unnorm_key": "k"}, "lora": {"rank": 8}}
    compute = {"device": "cpu", "num_slots": 8, "renderer": "llvmpipe (LLVM 15)"}
    more = {"policy": policy, "precision": {"weights": "float32"}, "later": {"x_y": True}}
    more["compute"] = compute
    done = vlarl("report", save("a|b.json", 3, env=env, **more), "--markdown")
    assert "- a\\|b.json: all 8" in done.stdout
    for line in (
        "  - env: name libero; horizon 30; protocol oft; cameras agentview, wrist; "
        "tasks 4 of them; settle steps 10; caveats an old \\| LIBERO",
        "  - policy: name oft; unnorm key k; lora.rank 8",
        "  - precision: weights float32",
        "  - later: x y yes",
        "  - compute: device cpu; renderer llvmpipe (LLVM 15)",
        "- **warning**: a\\|b.json: an old \\| LIBERO",
    ):
        assert f"\n{line}\n" in done.stdout
    assert "warning: a|b.json: an old | LIBERO" in done.stderr


def test_pipes_in_names_do_not_break_a_markdown_table(save):
    text = vlarl("report", save("a|b.json", 3), save("c.json", 2), "--markdown").stdout
    assert text.splitlines()[:2] == ["| task | a\\|b | c |", "| --- | --- | --- |"]


def test_escape_codes_of_a_foreign_file_reach_no_terminal(save):
    env = {"name": "\033[31mred\033[0m", "horizon": 30}
    done = vlarl("report", save("a.json", 3, env=env), "--markdown")
    assert "name ?[31mred?[0m" in done.stdout
    assert "\033" not in done.stdout + done.stderr


def test_a_merge_that_cannot_be_written_is_refused_at_once(save, monkeypatch):
    part = save("1.json", 3)
    Path("no").mkdir()
    may = os.access
    monkeypatch.setattr(os, "access", lambda p, mode: not mode & os.W_OK and may(p, mode))
    done = vlarl("merge", part, "--out", "no/whole.json")
    assert done.exit_code == 2
    assert "no permission to write" in done.stderr


def test_a_part_says_which_and_that_it_is_not_the_whole(save):
    done = vlarl("report", save("p.json", 3, played=(1, 3)), "--markdown")
    assert "- p.json: incomplete, 4 of 8 planned episodes (shard 2/2); plan " in done.stdout
    assert "| played episodes | 2/4 |" in done.stdout
    assert "p.json is incomplete, 4 of 8 planned episodes (shard 2/2)" in done.stderr


def test_a_result_without_episodes_is_named(save):
    done = vlarl("report", save("none.json", 3, played=()))
    assert done.exit_code == 2
    assert "none.json: no episode was played" in done.stderr


def test_results_side_by_side(save):
    text = vlarl("report", save("sft.json", 1), save("grpo.json", 4, sha="b" * 64)).stdout
    assert text.splitlines()[0].split() == ["task", "sft", "grpo"]
    assert text.splitlines()[-1].split("  ")[0] == "all episodes"
    assert "2/8, 25.0 % (7.1 to 59.1 %)" in text
    assert "8/8, 100.0 % (67.6 to 100.0 %)" in text


def test_results_measured_differently_are_pointed_out(save):
    other = {"env": {"name": "toy", "horizon": 60}, "sha": "b" * 64}
    done = vlarl("report", save("a.json", 1), save("b.json", 4, **other), "--markdown")
    (warning,) = done.stderr.splitlines()
    assert "a.json and b.json were not measured alike" in warning
    assert warning.endswith(": env.horizon: 30 | 60")
    assert "- **warning**: a.json and b.json were not" in done.stdout
    alike = vlarl("report", "a.json", save("c.json", 4, sha="c" * 64))
    assert alike.stderr == ""


def test_seeds_give_their_mean_and_its_t_interval(save):
    files = [save(f"{s}.json", wins, seed=s) for s, wins in enumerate((1, 2, 3))]
    found = json.loads(vlarl("report", *files, "--seeds", "--json").stdout)
    assert found["seeds"] == [0, 1, 2]
    assert found["warnings"] == []  # all measured the same weights
    assert found["success"]["k"] == [2, 4, 6]
    assert found["success"]["mean"] == 0.5
    # Student's t with 2 degrees of freedom, 4.302653; standard deviation of .25 .5 .75 is .25; the
    # lower limit 0.5 - 4.302653 * 0.25 / sqrt(3) = -0.121 is cut to 0.
    assert found["success"]["interval_95"] == [0.0, 1.0]
    files[2] = save("near.json", 2, seed=7)
    files[0] = save("near0.json", 2, seed=8)
    text = vlarl("report", *files, "--seeds").stdout
    assert "seed 8" in text
    assert "50.0 to 50.0 %" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"env": {"name": "toy", "horizon": 60}}, "env.horizon: 30 | 60"),
        ({"played": (0, 1)}, "b.json lacks 4 episodes"),
        ({"seed": 0}, "the same measurement"),
    ],
)
def test_what_is_no_set_of_seeds_is_refused(save, change, message):
    done = vlarl("report", save("a.json", 2), save("b.json", 2, **{"seed": 1, **change}), "--seeds")
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.fixture
def trained(save, tmp_path):
    """trained(run, seed, **settings): the result of a run's last iteration."""

    def write(run, seed, *, step=20, **settings):
        folder = tmp_path / run / "eval"
        folder.mkdir(parents=True)
        config = {"name": run, "seed": seed, "run_dir": run, **settings}
        (tmp_path / run / "config.json").write_text(json.dumps({"config": config, "sources": {}}))
        weights = {"sha256": None, "path": None, "step": step}
        return save(f"{run}/eval/step.json", 2, seed=seed, checkpoint=weights)

    return write


def test_seeds_of_one_recipe_need_no_warning(trained):
    files = [trained(f"g{seed}", seed, algo={"name": "grpo"}) for seed in (0, 1)]
    done = vlarl("report", *files, "--seeds", "--json")
    assert done.stderr == ""
    assert json.loads(done.stdout)["results"] == files


def test_seeds_of_different_trainings_are_pointed_out(trained):
    grpo = trained("g", 0, algo={"name": "grpo"})
    ppo = trained("p", 1, algo={"name": "ppo"}, step=30)
    done = vlarl("report", grpo, ppo, "--seeds", "--json")
    (warning,) = json.loads(done.stdout)["warnings"]
    assert 'algo.name: "grpo" | "ppo"; step: 20 | 30' in warning
    assert warning in done.stderr


def test_weights_of_a_lost_run_are_pointed_out(save):
    files = [save(f"{seed}.json", 2, seed=seed, sha=f"{seed}" * 64) for seed in (0, 1)]
    done = vlarl("report", *files, "--seeds")
    assert done.exit_code == 0
    assert "weights of 0.json, 1.json are not there to ask" in done.stderr


def test_one_result_has_no_mean_over_seeds(save):
    done = vlarl("report", save("a.json", 2), "--seeds")
    assert done.exit_code == 2
    assert "at least two" in done.stderr


def test_parts_become_whole_and_overlap_counts_once(save):
    parts = [save("1.json", 3, played=(0, 1, 2)), save("2.json", 3, played=(2, 3))]
    done = vlarl("merge", *parts, "--out", "whole.json")
    assert done.exit_code == 0
    assert "2 episodes were in more than one part" in done.stderr
    whole = load(Path("whole.json"))
    assert whole.is_complete
    assert (whole.total.k, whole.total.n) == (6, 8)


def test_what_no_part_played_is_named_and_nothing_is_written(save, tmp_path):
    done = vlarl("merge", save("1.json", 3, played=(0, 1, 3)), "--out", "whole.json")
    assert done.exit_code == 2
    assert "x trial 2 repeat 0" in done.stderr
    assert "y trial 2 repeat 0" in done.stderr
    assert "vlarl eval --shard I/N" in done.stderr
    assert not (tmp_path / "whole.json").exists()


def test_a_missing_part_is_named(save):
    parts = [save(f"{i}.json", 3, played=(i,)) for i in (0, 3)]
    done = vlarl("merge", *parts, "--out", "whole.json")
    assert done.exit_code == 2
    assert "shards 2/4, 3/4 are missing: `vlarl eval ... --shard 2/4`" in done.stderr


def test_a_comparison_names_its_files_and_weights(save):
    a, b = save("a.json", 1), save("b.json", 3, sha="b" * 64)
    found = json.loads(vlarl("compare", a, b, "--json").stdout)
    assert found["files"] == {"a": "a.json", "b": "b.json"}
    assert found["checkpoints"]["b"] == {"sha256": "b" * 64, "path": "p", "step": None}
    assert found["difference"] == 0.5


def test_parts_that_disagree_are_refused(save):
    done = vlarl("merge", save("1.json", 3), save("2.json", 2), "--out", "whole.json")
    assert done.exit_code == 2
    assert "1.json and 2.json disagree about x trial 2" in done.stderr
