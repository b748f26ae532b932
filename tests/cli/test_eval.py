import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vlarl import eval_journal
from vlarl.errors import RunFailed
from vlarl.evaluate import episode_result
from vlarl.result_file import load
from vlarl.results import EpisodeKey, EvalResult
from vlarl.run_dir import RunDir, RunLock
from vlarl.testing.token_policy import TokenConfig, TokenPolicy
from vlarl.testing.toy import write
from vlarl_cli.main import app

PLUGINS = Path(__file__).parent / "plugins"


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A toy checkpoint in a fresh working directory; the toy plug-ins can be found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(PLUGINS))
    folder = tmp_path / "toy"
    write(folder, TokenPolicy(TokenConfig(seed=3)).module.state_dict())
    (folder / "config.json").write_text('{"model_type": "toy"}')
    return folder


def vlarl(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


def result_of(*args, code=0):
    done = vlarl("eval", *args)
    assert done.exit_code == code, done.output
    return done


def error_of(*args, code=2):
    done = vlarl("eval", *args)
    assert done.exit_code == code, done.output
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr


def test_every_trial_of_the_suite_is_played_once(checkpoint):
    done = result_of("./toy", "--suite", "toy_both", "--out", "r.json")
    found = load(Path("r.json"))
    assert found.plan == tuple(
        EpisodeKey(task, trial, 0)
        for task in ("reach-left", "reach-right")
        for trial in range(1, 16, 2)
    )
    assert found.is_complete
    for word in ("reach-left", "mean of 2 groups", "all episodes", f"{found.total.k}/16"):
        assert word in done.stdout
    assert "0 of 16 planned episodes start from a trial of env.train_trials" in done.stderr


def test_the_stamp_says_how_it_was_measured(checkpoint):
    result_of("toy", "--suite", "toy_both", "--temperature", "1.5", "--seed", 4, "--out", "r.json")
    protocol = load(Path("r.json")).protocol
    assert protocol["sampling"] == {"temperature": 1.5, "seed": 4}
    assert protocol["trials"] == {"env": "toy_env", "numbered_by": "v1"}
    assert protocol["env"]["suite"] == "toy_both"
    assert len(protocol["checkpoint"]["sha256"]) == 64
    assert protocol["precision"] == {"weights": "float32", "compute": "float32"}


def test_slots_and_ranks_do_not_change_outcomes(checkpoint):
    common = ("toy", "--suite", "toy_both", "--temperature", 1, "--repeats", 2)
    result_of(*common, "--num-slots", 3, "--out", "three.json")
    result_of(*common, "--num-slots", 7, "--out", "seven.json")
    assert load(Path("three.json")).episodes == load(Path("seven.json")).episodes


@pytest.mark.dist
def test_three_ranks_give_the_same_outcomes(checkpoint, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS))
    common = ("toy", "--suite", "toy_both", "--temperature", 1, "--episodes", 5)
    result_of(*common, "--out", "one.json")
    done = result_of(*common, "--nproc", 3, "--out", "three.json")
    one, three = load(Path("one.json")), load(Path("three.json"))
    assert one.episodes == three.episodes
    assert three.protocol["compute"]["num_ranks"] == 3
    assert "10/10 episodes" in done.stderr
    assert sorted(p.name for p in Path().iterdir()) == ["one.json", "three.json", "toy"]


@pytest.mark.dist
def test_an_error_of_a_rank_is_the_command_s_error(checkpoint, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS))
    (checkpoint / "model.safetensors").unlink()
    args = ("toy", "--suite", "toy_both", "--nproc", 2, "--out", "r.json")
    assert "rank" not in error_of(*args, code=3), "found before a rank starts"
    # As if the file had gone in between.
    monkeypatch.setattr("toy_policy_plugin.check", lambda *_, **__: None)
    words = error_of(*args, code=3)
    assert "rank" in words
    assert "model.safetensors" in words
    assert not Path("r.json").exists()


def test_json_is_the_file(checkpoint):
    done = result_of("toy", "--suite", "toy_left", "--out", "r.json", "--json")
    assert json.loads(done.stdout) == json.loads(Path("r.json").read_text())


def test_quiet_is_the_path(checkpoint):
    done = result_of("toy", "--suite", "toy_left", "-q")
    (path,) = Path("results").glob("toy_toy_left_*.json")
    assert done.stdout == f"{path}\n"
    assert done.stderr == ""


def test_tasks_by_name_and_by_position(checkpoint):
    result_of("toy", "--suite", "toy_both", "--tasks", "1", "--out", "a.json")
    result_of("toy", "--suite", "toy_both", "--tasks", "reach-right", "--out", "b.json")
    a, b = load(Path("a.json")), load(Path("b.json"))
    assert a.plan == b.plan
    assert set(a.by_task) == {"reach-right"}


def test_training_trials_are_counted_as_such(checkpoint):
    done = result_of("toy", "--suite", "toy_left", "--split", "train", "--out", "r.json")
    assert "8 of 8 planned episodes start from a trial of env.train_trials" in done.stderr


def test_fail_under_exits_with_4(checkpoint):
    common = ("toy", "--suite", "toy_left")
    result_of(*common, "--out", "a.json", "--fail-under", 0.0)
    total = load(Path("a.json")).total
    assert total.value < 1
    done = result_of(*common, "--out", "b.json", "--fail-under", 1.0, code=4)
    assert "below --fail-under" in done.stderr
    assert load(Path("b.json")).total == total


def test_dry_run_writes_nothing(checkpoint):
    done = result_of("toy", "--suite", "toy_both", "--nproc", 2, "--dry-run")
    assert "would play 16 episodes" in done.stdout
    assert "torch.distributed.run" in done.stdout
    assert [p.name for p in Path().iterdir()] == ["toy"]


def test_videos_of_failures_only(checkpoint):
    result_of("toy", "--suite", "toy_both", "--video", "failures", "--out", "r.json")
    found = load(Path("r.json"))
    failures = [e for e in found.episodes if not e.success]
    assert failures
    names = sorted(p.name for p in Path("r").iterdir())
    assert len(names) == len(failures)
    assert all(name.endswith("_failure.mp4") for name in names)


def test_a_run_brings_its_settings_and_gets_the_result(checkpoint):
    step = Path("runs/r/ckpt/step_000007")
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    checkpoint.rename(step / "policy")
    config = {
        "name": "r",
        "seed": 5,
        "env": {"name": "toy_env", "suite": "toy_left", "max_steps": 9},
        "policy": {"name": "toy_policy", "checkpoint": "random", "hidden": 64},
        "rollout": {"temperature": 1.25},
        "eval": {"temperature": None},
        "compute": {"shard": "fsdp2"},
    }
    Path("runs/r/config.json").write_text(json.dumps({"config": config, "sources": {}}))
    done = result_of("runs/r", "-q")
    found = load(Path(done.stdout.strip()))
    assert Path(done.stdout).parent == Path("runs/r/eval")
    assert "r_step_000007" in done.stdout
    assert found.protocol["sampling"] == {"temperature": 1.25, "seed": 5}
    assert found.protocol["env"]["max_steps"] == 9
    assert set(found.by_task) == {"reach-left"}
    other = result_of("runs/r", "--suite", "toy_both", "env.max_steps=4", "--temperature", 0, "-q")
    changed = load(Path(other.stdout.strip()))
    assert changed.protocol["env"]["max_steps"] == 4
    assert len(changed.by_task) == 2


def test_a_run_without_a_checkpoint_says_so(checkpoint):
    Path("runs/r/ckpt").mkdir(parents=True)
    Path("runs/r/config.json").write_text("{}")
    assert "no complete checkpoint yet" in error_of("runs/r")


def test_unknown_suite_has_a_suggestion(checkpoint):
    assert "did you mean 'toy_left'" in error_of("toy", "--suite", "toy_lef")


def test_unknown_task_has_a_suggestion(checkpoint):
    words = error_of("toy", "--suite", "toy_both", "--tasks", "reach-lft,7")
    assert "did you mean 'reach-left'" in words
    assert "7 is not a position; the suite has 2" in words


def test_more_episodes_than_trials(checkpoint):
    words = error_of("toy", "--suite", "toy_both", "--episodes", 9)
    assert "8 trials but 9 were asked for" in words


def test_a_result_file_is_not_overwritten_unless_asked(checkpoint):
    Path("r.json").write_text("mine")
    common = ("toy", "--suite", "toy_left", "--out", "r.json")
    assert "not overwritten" in error_of(*common)
    assert "not overwritten" in error_of(*common, "--dry-run")
    assert Path("r.json").read_text() == "mine"
    result_of(*common, "--overwrite")
    assert load(Path("r.json")).is_complete


def test_an_output_folder_that_cannot_be(checkpoint):
    words = error_of("toy", "--suite", "toy_left", "--out", "toy/config.json/r.json")
    assert "config.json is a file" in words


def test_no_such_checkpoint(checkpoint):
    words = error_of("toyy", "--suite", "toy_left", code=3)
    assert "toyy" in words


def test_a_folder_that_is_no_checkpoint(checkpoint):
    Path("empty").mkdir()
    assert "not a checkpoint of a known policy" in error_of("./empty", "--suite", "toy_left")


def test_a_checkpoint_without_weights(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    words = error_of("toy", "--suite", "toy_left", code=3)
    assert "model.safetensors" in words
    assert not Path("results").exists()


def test_spec_mismatch_comes_before_the_weights(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    words = error_of("toy", "--suite", "toy_left", "policy.dims=3")
    assert "emits 3 numbers per action but env 'toy_env' takes 2" in words


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("env.max_stepz=3",), "env.max_stepz: unknown key; did you mean 'env.max_steps'"),
        (("--temperature", "-1"), "temperature"),
        (("--episodes", "0"), "episodes"),
        (("--repeats", "0"), "repeats"),
        (("--repeats", "2", "--temperature", "0"), "all 2 episodes of a trial are the same one"),
        (("env=3",), "env: is a section"),
        (("policy=null",), "policy: is a section"),
        (("--num-slots", "0"), "env.num_slots"),
        (("--nproc", "two"), "--nproc: expected a number"),
        (("policy.checkpoint=other",), "first argument"),
        (("nonsense",), "expected KEY=VALUE"),
        (("--out", "."), "out: a result file's name ends in .json; got '.'"),
        (("--out", "t0.5"), "out: a result file's name ends in .json; got 't0.5'"),
    ],
)
def test_wrong_values_name_their_key(checkpoint, args, words):
    assert words in error_of("toy", "--suite", "toy_left", *args)


def test_what_to_evaluate_must_be_named(checkpoint):
    assert "names no checkpoint" in error_of("--preset", "tiny_metaworld_sft")
    assert "name what to evaluate" in error_of("--suite", "toy_left")
    assert "--suite is needed" in error_of("./toy")


LONG = "toy --suite toy_both --repeats 20 --temperature 1 --num-slots 4 --out r.json"


def stopped(*signals, args=(), pause=0.0):
    """The long evaluation in a process that gets the signals after a tenth; its code and words."""
    # Under nohup, which some CI uses, SIGHUP would be ignored.
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    program = [sys.executable, "-c", code + "from vlarl_cli.main import main; main()"]
    process = subprocess.Popen(
        [*program, "eval", *LONG.split(), *args],
        env=os.environ | {"PYTHONPATH": str(PLUGINS)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    read = ""
    for text in process.stderr:
        read += text
        if text.startswith("1"):  # the first tenth is done
            break
    for number in signals:
        process.send_signal(number)
        time.sleep(pause)
    _, words = process.communicate(timeout=60)
    return process.returncode, read + words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ((signal.SIGINT,), 130),
        ((signal.SIGHUP, signal.SIGHUP), 130),
        ((signal.SIGTERM, signal.SIGINT), 130),
        ((signal.SIGKILL,), -signal.SIGKILL),
    ],
)
def test_an_evaluation_that_was_stopped_goes_on_where_it_was(checkpoint, signals, code):
    got, words = stopped(*signals)
    assert got == code, words
    assert not Path("r.json").exists()
    if code == 130:
        assert "--out r.json --resume plays the rest" in words
        partial = load(Path("r.partial.json"))
        assert 32 <= len(partial.episodes) < len(partial.plan)
    assert "go on with --resume" in error_of(*LONG.split())
    result_of(*LONG.split(), "--resume", "--num-slots", "2")
    assert not Path("r.partial.json").exists()
    assert not Path("r.work").exists()
    result_of(*LONG.replace("r.json", "whole.json").split())
    assert load(Path("r.json")).episodes == load(Path("whole.json")).episodes


@pytest.mark.slow
def test_ranks_that_were_killed_leave_what_they_played(checkpoint):
    got, words = stopped(
        signal.SIGINT, signal.SIGINT, args=("--repeats", "100", "--nproc", "2"), pause=0.4
    )
    assert got == 130, words
    assert len(load(Path("r.partial.json")).episodes) >= 32


def test_what_a_failed_evaluation_played_is_kept(checkpoint, monkeypatch):
    common = ("toy", "--suite", "toy_both", "--temperature", "1", "--num-slots", "2")

    def full_disk(self, path, **_):
        if path.name == "r.json":
            raise RunFailed(f"cannot write {path}: No space left on device")
        write_file(self, path, **_)

    write_file = EvalResult.save
    monkeypatch.setattr(EvalResult, "save", full_disk)
    words = error_of(*common, "--out", "r.json", code=1)
    kept = "16 of 16 episodes are kept in r.partial.json; that is the whole result"
    assert kept in words
    assert not Path("r.work").exists()
    assert load(Path("r.partial.json")).is_complete
    whole = load(Path("r.partial.json"))
    monkeypatch.undo()
    monkeypatch.chdir(checkpoint.parent)
    monkeypatch.syspath_prepend(str(PLUGINS))
    write(checkpoint, TokenPolicy(TokenConfig(seed=4)).module.state_dict())
    said = error_of(*common, "--out", "r.json", "--resume")
    assert "was played otherwise: checkpoint.sha256: " in said
    write(checkpoint, TokenPolicy(TokenConfig(seed=3)).module.state_dict())
    done = result_of(*common, "--out", "r.json", "--resume")
    assert "everything was played already; only the result is written" in done.stderr
    assert load(Path("r.json")) == whole
    assert not Path("r.partial.json").exists()


def test_overwriting_drops_what_a_stopped_evaluation_left(checkpoint, monkeypatch):
    common = ("toy", "--suite", "toy_both", "--num-slots", "2", "--out", "r.json")
    result_of(*common)
    whole = load(Path("r.json"))
    replace(whole, episodes=whole.episodes[:5]).save(Path("r.partial.json"))
    Path("r.json").unlink()
    played = []

    def third_breaks(outcome):
        played.append(outcome)
        if len(played) == 3:
            raise RunFailed("the third one")
        return episode_result(outcome)

    monkeypatch.setattr("vlarl.eval_job.episode_result", third_breaks)
    words = error_of(*common, "--temperature", "1", "--overwrite", code=1)
    assert "2 of 16 episodes are kept" in words
    assert not Path("r.work").exists()
    left = load(Path("r.partial.json"))
    assert (len(left.episodes), left.protocol["sampling"]["temperature"]) == (2, 1.0)


@pytest.mark.parametrize("damage", ["twice", "impossible", "headless", "partial"])
def test_damaged_leftovers_are_named_and_can_be_dropped(checkpoint, damage):
    common = ("toy", "--suite", "toy_both", "--num-slots", "2", "--out", "r.json")
    result_of(*common)
    whole = load(Path("r.json"))
    work = eval_journal.work_dir(Path("r.json"))
    work.logs.mkdir(parents=True)
    work.lock.touch()
    eval_journal.begin(work, replace(whole, episodes=()))
    Path("r.json").unlink()
    with eval_journal.writer(work, 0) as note:
        note(whole.episodes[0])
        if damage == "twice":
            note(whole.episodes[0])
    if damage == "impossible":
        journal = work.logs / "episodes_0.jsonl"
        journal.write_text(re.sub(r'"num_steps": \d+', '"num_steps": 9999', journal.read_text()))
    if damage == "headless":
        (work.path / "empty.json").unlink()
    if damage == "partial":
        Path("r.partial.json").write_text("{}")
    for words in ((), ("--resume",)):
        said = error_of(*common, *words, code=1)
        assert "what a stopped evaluation left for r.json is damaged: " in said
        assert "start anew with --overwrite" in said
    result_of(*common, "--overwrite")
    assert load(Path("r.json")).episodes == whole.episodes


def test_a_full_disk_loses_the_episode_it_has_no_room_for_alone(checkpoint, tmp_path):
    work = eval_journal.work_dir(Path("r.json"))
    work.logs.mkdir(parents=True)
    common = ("toy", "--suite", "toy_both", "--num-slots", "2", "--out", "whole.json")
    result_of(*common)
    whole = load(Path("whole.json"))
    eval_journal.begin(work, replace(whole, episodes=()))
    journal = work.logs / "episodes_0.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with eval_journal.writer(work, 0) as note:
            note(whole.episodes[0])
            resource.setrlimit(resource.RLIMIT_FSIZE, (journal.stat().st_size + 50, before[1]))
            with pytest.raises(
                RunFailed, match=r"cannot write .*episodes_0\.jsonl: File too large"
            ):
                note(whole.episodes[1])
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            note(whole.episodes[2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    found = eval_journal.recover(Path("r.json"))
    assert found.episodes == (whole.episodes[0], whole.episodes[2])


def test_a_failure_before_the_first_episode_leaves_nothing(checkpoint, monkeypatch):
    def breaks(outcome):
        raise RunFailed("the first one")

    monkeypatch.setattr("vlarl.eval_job.episode_result", breaks)
    words = error_of("toy", "--suite", "toy_both", "--out", "r.json", code=1)
    assert "kept" not in words
    assert list(Path().glob("r.*")) == []


def test_two_evaluations_do_not_share_a_result_file(checkpoint):
    common = ("toy", "--suite", "toy_both", "--out", "r.json")
    Path("r.work").mkdir()
    with RunLock(RunDir(Path("r.work"))):
        for words in ((), ("--resume",), ("--overwrite",), ("--dry-run",)):
            said = error_of(*common, *words)
            assert "another evaluation is playing for r.json" in said
    result_of(*common)
    assert not Path("r.work").exists()


def test_a_folder_of_somebody_else_is_left_alone(checkpoint):
    Path("r.work/logs").mkdir(parents=True)
    Path("r.work/config.json").write_text("mine")
    for words in ((), ("--overwrite",), ("--dry-run",)):
        said = error_of("toy", "--suite", "toy_both", "--out", "r.json", *words)
        assert "r.work is where the evaluation for r.json would keep what it plays" in said
    assert Path("r.work/config.json").read_text() == "mine"


def test_only_the_same_evaluation_is_resumed(checkpoint, monkeypatch):
    common = ("toy", "--suite", "toy_both", "--num-slots", "2", "--out", "r.json")
    assert "no stopped evaluation left anything" in error_of(*common, "--resume")
    result_of(*common)
    whole = load(Path("r.json"))
    replace(whole, episodes=whole.episodes[:5]).save(Path("r.partial.json"))
    words = error_of(*common, "--resume")
    assert "r.json exists" in words
    Path("r.json").unlink()
    for words in ((), ("--dry-run",)):
        said = error_of(*common, "--resume", "--temperature", "1", *words)
        assert "for r.json was played otherwise: sampling.temperature: 0.0 | 1.0; give" in said
        assert "are kept" not in said
        said = error_of(*common, "--resume", "--repeats", "2", "--temperature", "0.5", *words)
        assert "played otherwise" in said
        said = error_of(*common, "--resume", "--episodes", "3", *words)
        assert "is of a plan of 16 episodes, reach-left trial 1 repeat 0 and 15 more, and" in said
        assert "this command plans 6" in said
    write(checkpoint, TokenPolicy(TokenConfig(seed=4)).module.state_dict())
    said = error_of(*common, "--resume")
    assert "was played otherwise: checkpoint.sha256: " in said
    assert "are kept" not in said
    write(checkpoint, TokenPolicy(TokenConfig(seed=3)).module.state_dict())
    assert len(load(Path("r.partial.json")).episodes) == 5
    done = result_of(*common, "--resume", "--video", "failures", "--dry-run")
    assert "5 episodes played before are not filmed; `vlarl video r.json`" in done.stderr
    played = []
    monkeypatch.setattr(
        "vlarl.eval_job.episode_result", lambda o: played.append(o) or episode_result(o)
    )
    done = result_of(*common, "--resume")
    assert "2 tasks, 11 episodes" in done.stderr
    assert len(played) == 11
    assert load(Path("r.json")).episodes == whole.episodes


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--temperature", "1", "temperature=2"), "temperature: --temperature says it already"),
        (("--split", "eval", "split=train"), "split: --split says it already"),
        (("env.suite=toy_left",), "env.suite: --suite says it already"),
        (("--tasks", "0", "env.tasks=[reach-left]"), "env.tasks: --tasks says it already"),
        (("out=r.json",), "out: name the result file with --out instead"),
        (("--tasks", ""), "--tasks: the suite has no task ''"),
    ],
)
def test_what_is_said_twice_is_refused(checkpoint, args, words):
    assert words in error_of("toy", "--suite", "toy_both", *args)


def test_a_default_is_not_something_said(checkpoint):
    result_of("toy", "--suite", "toy_both", "split=train", "--out", "r.json")
    assert load(Path("r.json")).protocol["plan"]["split"] == "train"


def test_compare_pairs_two_files(checkpoint):
    common = ("toy", "--suite", "toy_both")
    result_of(*common, "--out", "a.json")
    result_of(*common, "--out", "b.json", "--temperature", 2.0)
    done = vlarl("compare", "a.json", "b.json")
    assert done.exit_code == 0, done.output
    a, b = load(Path("a.json")).total, load(Path("b.json")).total
    last = done.stdout.splitlines()[-1]
    assert last.startswith("all pairs")
    assert f"{a.k}/16" in last
    assert f"{100 * (b.value - a.value):+.1f} points" in last
    assert "sampling.temperature: 0.0 | 2.0" in done.stderr
    document = json.loads(vlarl("compare", "a.json", "b.json", "--json").stdout)
    assert document["pairs"] == 16
    assert document["difference"] == pytest.approx(b.value - a.value)
    same = vlarl("compare", "a.json", "a.json", "-q")
    assert same.stdout == "+0.0000\n"
    assert same.stderr == ""


def test_compare_of_different_plans_says_why(checkpoint):
    result_of("toy", "--suite", "toy_left", "--out", "a.json")
    result_of("toy", "--suite", "toy_left", "--split", "train", "--out", "b.json")
    done = vlarl("compare", "a.json", "b.json")
    assert done.exit_code == 2
    assert "no episode in common" in done.stderr
    assert done.stdout == ""


def test_shards_together_are_the_whole_evaluation(checkpoint):
    common = ("toy", "--suite", "toy_both", "--temperature", 1)
    result_of(*common, "--out", "whole.json")
    for i in (1, 2, 3):
        done = result_of(*common, "--shard", f"{i}/3", "--out", f"{i}.json")
        assert f"part {i}/3 of 16" in done.stderr
    assert len(load(Path("3.json")).episodes) == 5
    merged = vlarl("merge", "1.json", "2.json", "3.json", "--out", "merged.json")
    assert merged.exit_code == 0, merged.output
    assert load(Path("merged.json")).episodes == load(Path("whole.json")).episodes


@pytest.mark.parametrize("shard", ["0/3", "4/3", "1", "a/b", "1/17"])
def test_a_part_that_does_not_exist(checkpoint, shard):
    assert "shard" in error_of("toy", "--suite", "toy_both", "--shard", shard)
