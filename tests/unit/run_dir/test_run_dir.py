import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from vlarl import run_dir
from vlarl.errors import AssetMissing, ConfigError, CorruptFile
from vlarl.run_dir import RankExit, RunDir, RunLock, Status


def used(path: Path) -> RunDir:
    run = run_dir.create(path)
    run.config.write_text('{"config": {}, "sources": {}}')
    run.metrics.write_text('{"step": 1}\n')
    checkpoint(run, 20)
    return run


def checkpoint(run: RunDir, step: int) -> Path:
    folder = run.checkpoint(step)
    folder.mkdir(parents=True)
    (folder / run_dir.MANIFEST).write_text("{}")
    return folder


def test_a_new_run_has_its_folders(tmp_path):
    run = run_dir.create(tmp_path / "a" / "b")
    assert {p.name for p in run.path.iterdir() if p.is_dir()} == {"logs", "ckpt", "eval", "video"}
    assert run.checkpoint(100).name == "step_000100"


def test_a_used_run_is_refused_and_the_ways_out_are_named(tmp_path):
    used(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"step_000020.*--resume.*--overwrite"):
        run_dir.create(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_resume_keeps_everything(tmp_path):
    run = used(tmp_path / "run")
    run_dir.create(run.path, resume=True)
    assert run.metrics.read_text() == '{"step": 1}\n'
    assert run_dir.checkpoints(run) == [run.checkpoint(20)]


def test_resume_needs_a_run(tmp_path):
    with pytest.raises(ConfigError, match="nothing to resume"):
        run_dir.create(tmp_path / "typo", resume=True)
    assert not (tmp_path / "typo").exists()


def test_overwrite_deletes_the_run_and_nothing_else(tmp_path):
    run = used(tmp_path / "run")
    (run.path / "my_notes.md").write_text("keep")
    run_dir.create(run.path, overwrite=True)
    assert not run.metrics.exists()
    assert not run.config.exists()
    assert run_dir.checkpoints(run) == []
    assert (run.path / "my_notes.md").read_text() == "keep"


def test_overwrite_refuses_a_folder_that_is_no_run(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="does not look like a run"):
        run_dir.create(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize("content", [b'{"config": ', b"", b"\xff", b"[]", b"{}"])
def test_overwrite_deletes_a_run_whose_config_is_damaged(tmp_path, content):
    run = used(tmp_path / "run")
    run_dir.append_command(run, ["vlarl", "train", "--preset", "x"])
    run.config.write_bytes(content)
    run_dir.create(run.path, overwrite=True)
    assert not run.config.exists()
    assert run_dir.checkpoints(run) == []


@pytest.mark.parametrize("command", [None, b"make all\n", b"vlarl 'train\n", b"\xff\n", b""])
def test_overwrite_refuses_a_damaged_config_that_nothing_says_is_ours(tmp_path, command):
    (tmp_path / "config.json").write_text('{"model_type": ')
    if command is not None:
        (tmp_path / "command.txt").write_bytes(command)
    with pytest.raises(ConfigError, match="does not look like a run"):
        run_dir.create(tmp_path, overwrite=True)
    assert (tmp_path / "config.json").exists()


def test_a_command_line_alone_makes_no_run(tmp_path):
    (tmp_path / "command.txt").write_text("vlarl train --preset x\n")
    with pytest.raises(ConfigError, match="does not look like a run"):
        run_dir.create(tmp_path, overwrite=True)


def test_a_file_and_two_contrary_flags_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        run_dir.create(tmp_path / "file")
    with pytest.raises(ConfigError, match="exclude each other"):
        run_dir.create(tmp_path / "x", resume=True, overwrite=True)


HOLDER = """
    import sys, time
    from pathlib import Path
    from vlarl.run_dir import RunDir, RunLock
    held = RunLock(RunDir(Path(sys.argv[1])))
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_writer_at_a_time_and_sigkill_frees_the_lock(tmp_path):
    run = used(tmp_path / "run")
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(run.path)], stdout=subprocess.PIPE
    )
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"process {other.pid} on "):
            RunLock(run)
        with pytest.raises(ConfigError, match="being written"):
            run_dir.create(run.path, overwrite=True)
        assert run.metrics.exists()
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        other.stdout.close()
    with RunLock(run), pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        RunLock(run)
    RunLock(run).release()


def test_only_complete_checkpoints_count_in_numeric_order(tmp_path):
    run = run_dir.create(tmp_path / "run")
    assert run_dir.latest_checkpoint(run) is None
    checkpoint(run, 1_000_000)
    checkpoint(run, 999_999)
    (run.ckpt / "step_2000000").mkdir()  # no manifest
    checkpoint(run, 3_000_000).rename(run.ckpt / "step_3000000.tmp")
    assert [p.name for p in run_dir.checkpoints(run)] == ["step_999999", "step_1000000"]
    assert run_dir.latest_checkpoint(run) == run.checkpoint(1_000_000)


def test_find_checkpoint_by_step_folder_or_default(tmp_path):
    run = used(tmp_path / "run")
    checkpoint(run, 30)
    assert run_dir.find_checkpoint(run, None) == run.checkpoint(30)
    assert run_dir.find_checkpoint(run, "20") == run.checkpoint(20)
    assert run_dir.find_checkpoint(run, str(run.checkpoint(20))) == run.checkpoint(20)
    with pytest.raises(ConfigError, match=r"no checkpoint '25'.*20, 30"):
        run_dir.find_checkpoint(run, "25")


def test_status_round_trip(tmp_path):
    run = run_dir.create(tmp_path / "run")
    assert run_dir.read_status(run) is None
    run_dir.write_status(run, Status(phase="rollout", step=3, max_steps=9, done=5, total=64))
    got = run_dir.read_status(run)
    assert (got.phase, got.step, got.max_steps, got.done, got.total) == ("rollout", 3, 9, 5, 64)
    assert got.updated > 1e9
    assert list(run.path.glob(".status*")) == []


def test_exit_notes_come_back_earliest_first(tmp_path):
    run = run_dir.create(tmp_path / "run")
    run_dir.write_exit(run, RankExit(rank=1, code=1, kind="WorkerDied", message="slot 3 hung"))
    run_dir.write_exit(run, RankExit(rank=0, code=130))
    assert [(e.rank, e.code, e.message) for e in run_dir.read_exits(run)] == [
        (1, 1, "slot 3 hung"),
        (0, 130, ""),
    ]
    run_dir.clear_exits(run)
    assert run_dir.read_exits(run) == []


def test_damaged_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"a": ')
    with pytest.raises(CorruptFile, match=r"config\.json"):
        run_dir.read_json(tmp_path / "config.json")


def test_commands_are_quoted_for_a_shell(tmp_path):
    run = run_dir.create(tmp_path / "run")
    run_dir.append_command(run, ["vlarl", "train", "name=two words"])
    run_dir.append_command(run, ["vlarl", "train", "--resume"])
    assert run.command.read_text() == "vlarl train 'name=two words'\nvlarl train --resume\n"


def test_the_module_needs_no_torch():
    code = "import sys, vlarl.run_dir, vlarl.metrics; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_overwrite_refuses_a_checkpoint_although_it_has_a_config(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "openvla"}')
    (tmp_path / "logs").mkdir()
    with pytest.raises(ConfigError, match="does not look like a run"):
        run_dir.create(tmp_path, overwrite=True)
    assert (tmp_path / "config.json").exists()
    assert (tmp_path / "logs").exists()


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write into run directory .*file/run.*--run-dir"):
        run_dir.create(tmp_path / "file" / "run")


def test_check_refuses_what_create_refuses_and_makes_nothing(tmp_path):
    run_dir.check(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    run = used(tmp_path / "run")
    with pytest.raises(ConfigError, match="is not empty"):
        run_dir.check(run.path)
    run_dir.check(run.path, overwrite=True)
    assert run.metrics.exists()


def test_a_spoiled_status_is_no_status(tmp_path):
    run = run_dir.create(tmp_path / "run")
    for spoiled in ("garbage", "[]", '{"phase": "x"}'):
        run.status.write_text(spoiled)
        assert run_dir.read_status(run) is None


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (ConfigError("bad"), RankExit(rank=3, code=2, kind="ConfigError", message="bad")),
        (
            AssetMissing("gone", fix="get it"),
            RankExit(rank=3, code=3, kind="AssetMissing", message="gone", fix="get it"),
        ),
        (ZeroDivisionError("no"), RankExit(rank=3, code=1, kind="ZeroDivisionError", message="no")),
    ],
)
def test_an_error_is_the_end_of_a_rank(error, end):
    assert RankExit.of(3, error) == end
