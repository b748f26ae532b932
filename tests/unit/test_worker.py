"""One rank of a run: what it builds, how it ends, and the notes it leaves."""

import logging
import os
import signal

import pytest
import torch

from vlarl import metrics, run_dir, worker
from vlarl.testing import reach, token_policy


@pytest.fixture(autouse=True)
def _undisturbed():
    """The worker takes signals and the log over; give both back."""
    signals = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    level, threads = logging.getLogger().level, torch.get_num_threads()
    yield
    for number, handler in signals.items():
        signal.signal(number, handler)
    logging.getLogger().setLevel(level)
    torch.set_num_threads(threads)


@pytest.fixture
def envs(monkeypatch):
    """Every env the worker makes; envs.on_send is called before each message."""

    class Made(list):
        on_send = staticmethod(lambda count: None)

    made = Made()

    class Watched(reach.ReachEnv):
        closed, sent = 0, 0

        def send(self, slots, action):
            self.sent += 1
            made.on_send(self.sent)
            super().send(slots, action)

        def close(self):
            self.closed += 1

    def make(cfg, *, num_slots, final_frames):
        made.append(Watched(cfg, num_slots=num_slots))
        made[-1].final_frames = final_frames
        return made[-1]

    monkeypatch.setattr(reach, "make", make)
    return made


def ended(folder):
    (note,) = run_dir.read_exits(folder)
    return note


def test_a_run_that_ends_well(toy_run, envs):
    folder = toy_run("max_steps=2")
    assert worker.main([str(folder.path)]) == 0
    assert (ended(folder).code, ended(folder).kind, ended(folder).rank) == (0, "", 0)
    assert run_dir.read_status(folder).phase == "done"
    assert run_dir.latest_checkpoint(folder).name == "step_000002"
    assert [env.closed for env in envs] == [1]
    assert envs[0].num_slots == 5


@pytest.mark.parametrize(("algo", "wanted"), [("grpo", False), ("ppo", True)])
def test_last_frames_are_rendered_only_for_a_value_head(toy_run, envs, algo, wanted):
    worker.main([str(toy_run(f"algo={{name: {algo}}}", "max_steps=0").path)])
    assert [env.final_frames for env in envs] == [wanted]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_what_is_finished_and_a_second_start_goes_on(toy_run, envs, number):
    whole, folder = toy_run(), toy_run("save.every=9")
    assert worker.main([str(whole.path)]) == 0
    envs.on_send = lambda count: os.kill(os.getpid(), number) if count == 60 else None
    assert worker.main([str(folder.path)]) == 130
    assert (ended(folder).code, ended(folder).kind) == (130, "Stopped")
    status = run_dir.read_status(folder)
    assert (status.phase, status.message) == ("interrupted", "")
    saved = run_dir.checkpoint_step(run_dir.latest_checkpoint(folder))
    assert 0 < saved < 4
    assert envs[-1].closed == 1

    envs.on_send = lambda count: None
    run_dir.clear_exits(folder)
    assert worker.main([str(folder.path)]) == 0
    lines = [metrics.strip_timing(line) for line in metrics.read(folder.metrics)]
    assert lines == [metrics.strip_timing(line) for line in metrics.read(whole.metrics)]


def test_an_error_is_a_note_with_its_exit_code(toy_run, envs):
    folder = toy_run("env.max_steps=1", "patience=1", "eval.ends=false")
    assert worker.main([str(folder.path)]) == 1
    note = ended(folder)
    assert (note.code, note.kind, note.fix) == (1, "NothingToLearn", "")
    assert "every episode failed" in note.message
    status = run_dir.read_status(folder)
    assert (status.phase, status.message) == ("failed", note.message)
    assert envs[0].closed == 1


def test_a_missing_thing_comes_with_the_command_that_gets_it(toy_run, tmp_path, envs):
    folder = toy_run(f"policy.checkpoint={tmp_path / 'nowhere'}")
    assert worker.main([str(folder.path)]) == 3
    assert (ended(folder).kind, ended(folder).fix) == (
        "AssetMissing",
        "policy.checkpoint=random",
    )
    assert envs == [], "simulators start last"


def test_a_config_that_does_not_fit_starts_nothing(toy_run, envs, monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(token_policy, "load", load)
    folder = toy_run("policy.dims=3")
    assert worker.main([str(folder.path)]) == 2
    assert ended(folder).kind == "SpecMismatch"
    assert envs == []


def test_a_folder_that_is_no_run_is_a_config_error(tmp_path):
    folder = run_dir.create(tmp_path / "empty")
    assert worker.main([str(folder.path)]) == 2
    assert ended(folder).kind == "ConfigError"
    assert "does not exist" in ended(folder).message


def test_a_damaged_checkpoint_is_named(toy_run, envs):
    folder = toy_run("max_steps=1")
    assert worker.main([str(folder.path)]) == 0
    state = run_dir.latest_checkpoint(folder) / "state.json"
    state.write_text(state.read_text()[:-5])
    run_dir.clear_exits(folder)
    assert worker.main([str(folder.path)]) == 1
    assert ended(folder).kind == "CorruptFile"
    assert str(state) in ended(folder).message
    assert len(envs) == 1, "the second start ended before its simulators"


def test_what_a_checkpoint_lacks_is_drawn_from_the_seed(toy_run, monkeypatch):
    """Whatever happened to torch's random numbers before."""
    drawn = []

    def load(cfg, **given):
        policy = token_policy.TokenPolicy(cfg, device=given["device"])
        for p in policy.module.parameters():
            torch.nn.init.uniform_(p, -0.1, 0.1)
        drawn.append(next(policy.module.parameters()).detach().clone())
        return policy

    monkeypatch.setattr(token_policy, "load", load)
    for draws, seed in ((0, 1), (5, 1), (0, 2)):
        torch.rand(draws)
        worker.main([str(toy_run("max_steps=0", "eval.ends=false", f"seed={seed}").path)])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
