import json
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from vlarl import checkpoint_manifest, run_dir
from vlarl.distributed import checkpoint, dcp_io
from vlarl.distributed.world import World
from vlarl.errors import ConfigError, CorruptFile, RunFailed
from vlarl.run_dir import RunDir

ALONE = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))


def make(seed=0, width=8):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2), nn.Linear(2, 1))
    net[3].requires_grad_(False)
    # Two groups, so that one of them can be left out of a step, as in a critic's warm-up.
    groups = [{"params": [*net[i].parameters()], "lr": 1e-2, "name": f"part{i}"} for i in (0, 2)]
    return net, torch.optim.AdamW(groups, betas=(0.8, 0.9), weight_decay=0.1)


def step(net, optimizer, *, only_last=False):
    optimizer.zero_grad(set_to_none=True)
    x = torch.randn(6, 4)  # the global stream, so a lost random state shows in the weights
    hidden = net[:2](x).detach() if only_last else net[:2](x)
    net[2:](hidden).square().sum().backward()
    optimizer.step()


def save(folder, net, optimizer, state=None, saver=None):
    def write(path, full):
        assert full is None
        path.mkdir()
        (path / "config.json").write_text("{}")

    checkpoint.save(
        folder, module=net, optimizer=optimizer, state=state or {"step": 1}, world=ALONE,
        policy_saver=saver or write,
    )  # fmt: skip


def load(folder, net, optimizer):
    return checkpoint.load(folder, module=net, optimizer=optimizer, world=ALONE)


def weights(net):
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def drawn():
    """From each of the global generators."""
    return torch.rand(1), np.random.rand(), random.random()  # noqa: NPY002


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("warm_steps", [0, 1, 3])
def test_resume_equals_an_unbroken_run_bit_for_bit(tmp_path, warm_steps):
    """Also when parts of the optimizer, or all of it, have not stepped yet."""
    net, optimizer = make()
    for number in range(warm_steps):
        step(net, optimizer, only_last=number == 0)
    save(tmp_path / "step_000001", net, optimizer)
    for _ in range(3):
        step(net, optimizer)
    draws = drawn()

    other, other_optimizer = make(seed=9)
    load(tmp_path / "step_000001", other, other_optimizer)
    for _ in range(3):
        step(other, other_optimizer)
    assert same(weights(net), weights(other))
    assert draws == drawn()
    assert net[0].weight.abs().max() > 0


def test_settings_and_state_come_back(tmp_path):
    net, optimizer = make()
    step(net, optimizer)
    optimizer.param_groups[1]["lr"] = 1 / 3
    state = {"step": 7, "best": 0.1 + 0.2, "name": "é", "none": None}
    save(tmp_path / "step_000007", net, optimizer, state)
    other, other_optimizer = make(seed=9)
    assert load(tmp_path / "step_000007", other, other_optimizer) == state
    group = other_optimizer.param_groups[1]
    assert (group["lr"], group["betas"], group["name"]) == (1 / 3, (0.8, 0.9), "part2")


def test_an_unstepped_parameter_has_no_moments_afterwards(tmp_path):
    net, optimizer = make()
    step(net, optimizer, only_last=True)
    save(tmp_path / "step_000001", net, optimizer)
    other, other_optimizer = make(seed=9)
    load(tmp_path / "step_000001", other, other_optimizer)
    assert other[0].weight not in other_optimizer.state
    assert other_optimizer.state[other[2].weight]["step"] == 1


def test_the_policy_is_inside_and_listed(tmp_path):
    net, optimizer = make()
    save(tmp_path / "step_000001", net, optimizer)
    manifest = json.loads((tmp_path / "step_000001" / "manifest.json").read_text())
    assert manifest["step"] == 1
    assert manifest["ranks"] == 1
    assert manifest["files"]["policy/config.json"] == 2
    on_disk = {
        str(p.relative_to(tmp_path / "step_000001"))
        for p in (tmp_path / "step_000001").rglob("*")
        if p.is_file()
    }
    assert on_disk == {*manifest["files"], "manifest.json"}


FILES = ["state.json", "rng/rank_0.pt", "dcp/.metadata", "dcp/__0_0.distcp", "policy/config.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "delete", "flip"])
def test_a_damaged_file_is_named(tmp_path, name, damage):
    net, optimizer = make()
    save(tmp_path / "step_000001", net, optimizer)
    path = tmp_path / "step_000001" / name
    if damage == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif damage == "flip":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
    before = weights(net)
    with pytest.raises(CorruptFile, match=f"{name}.*--resume-from"):
        load(tmp_path / "step_000001", net, optimizer)
    assert same(before, weights(net))


def test_a_file_that_lost_its_hash_is_damage(tmp_path):
    net, optimizer = make()
    save(tmp_path / "step_000001", net, optimizer)
    path = tmp_path / "step_000001" / "manifest.json"
    content = json.loads(path.read_text())
    content["sha256"]["state,json"] = content["sha256"].pop("state.json")
    path.write_text(json.dumps(content))
    with pytest.raises(CorruptFile, match=r"state\.json: its content is not what was written"):
        checkpoint_manifest.verify(path.parent)


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path):
    (tmp_path / "step_000001").mkdir()
    net, optimizer = make()
    with pytest.raises(CorruptFile, match="not a complete checkpoint"):
        load(tmp_path / "step_000001", net, optimizer)


def test_another_network_is_refused_with_names(tmp_path):
    net, optimizer = make()
    save(tmp_path / "step_000001", net, optimizer)
    wide, wide_optimizer = make(width=9)
    with pytest.raises(ConfigError, match=r"of another shape: 0\.bias, 0\.weight, 2\.weight"):
        load(tmp_path / "step_000001", wide, wide_optimizer)
    net.extra = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"missing in the checkpoint: extra\.bias, extra\.weight"):
        load(tmp_path / "step_000001", net, optimizer)


def test_another_set_of_trained_parameters_is_refused(tmp_path):
    net, optimizer = make()
    save(tmp_path / "step_000001", net, optimizer)
    with pytest.raises(ConfigError, match="trains other parameters"):
        load(tmp_path / "step_000001", net, torch.optim.AdamW(net[0].parameters()))


class Boom:
    def __reduce__(self):
        return (os.system, ("touch boom",))


def test_hostile_metadata_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net, optimizer = make()
    save(tmp_path / "step_000001", net, optimizer)
    path = tmp_path / "step_000001" / "dcp" / ".metadata"
    path.write_bytes(pickle.dumps(Boom()))
    with pytest.raises(CorruptFile, match=r"\.metadata: .*system"):
        dcp_io.read(path.parent, net, optimizer, dcp_io.optimizer_settings(net, optimizer), ALONE)
    assert not (tmp_path / "boom").exists()


def test_a_failing_writer_leaves_the_last_checkpoint_and_nothing_else(tmp_path):
    net, optimizer = make()
    save(tmp_path / "step_000001", net, optimizer)
    step(net, optimizer)

    def full_disk(path, _):
        path.mkdir()
        (path / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(
        RunFailed, match=r"step_000002.*No space left.*needs more than [\d,]+ bytes"
    ):
        save(tmp_path / "step_000002", net, optimizer, saver=full_disk)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    load(tmp_path / "step_000001", net, optimizer)


def test_too_little_room_is_found_before_writing(tmp_path, monkeypatch):
    net, optimizer = make()
    usage = checkpoint.shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(RunFailed, match=r"not enough room.*100 bytes are free"):
        save(tmp_path / "step_000002", net, optimizer)
    assert list(tmp_path.iterdir()) == []


def in_a_process(code, *args):
    head = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    head += "from test_checkpoint import *\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(code), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("limit", [600, 2000])
def test_a_write_that_the_system_refuses_is_reported(tmp_path, limit):
    """RLIMIT_FSIZE fails writes in the middle of a file, as a full disk does."""
    net, optimizer = make()
    step(net, optimizer)
    save(tmp_path / "step_000001", net, optimizer)
    sizes = json.loads((tmp_path / "step_000001" / "manifest.json").read_text())["files"]
    assert max(sizes.values()) > limit
    code = """
        import resource

        net, optimizer = make()
        step(net, optimizer)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
        try:
            save(Path(sys.argv[1]) / "step_000002", net, optimizer)
        except RunFailed as error:
            print("RunFailed", error)
    """
    process = in_a_process(code, tmp_path, limit)
    out, err = process.communicate(timeout=100)
    assert out.startswith("RunFailed checkpoint"), err
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    checkpoint_manifest.verify(tmp_path / "step_000001")


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["_save_rng", "_seal"])
def test_sigkill_while_saving_leaves_the_last_checkpoint(tmp_path, moment):
    net, optimizer = make()
    run = run_dir.create(tmp_path / "run")
    save(run.checkpoint(1), net, optimizer)
    code = """
        net, optimizer = make()
        setattr(checkpoint, sys.argv[2], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        save(Path(sys.argv[1]) / "step_000002", net, optimizer)
    """
    process = in_a_process(code, run.ckpt, moment)
    _, err = process.communicate(timeout=100)
    assert process.returncode == -signal.SIGKILL, err
    assert (run.ckpt / "step_000002.tmp").is_dir()
    assert run_dir.latest_checkpoint(run) == run.checkpoint(1)
    load(run.checkpoint(1), net, optimizer)
    save(run.checkpoint(2), net, optimizer)
    checkpoint.prune(run, keep=5)
    assert sorted(p.name for p in run.ckpt.iterdir()) == ["step_000001", "step_000002"]


def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path):
    net, optimizer = make()
    save(tmp_path / "step_000001", net, optimizer, {"step": 1, "try": 1})
    save(tmp_path / "step_000001", net, optimizer, {"step": 1, "try": 2})
    assert load(tmp_path / "step_000001", net, optimizer)["try"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


def test_prune_keeps_the_newest_and_drop_after_the_oldest(tmp_path):
    net, optimizer = make()
    run = RunDir(tmp_path)
    for number in (10, 20, 30, 40):
        save(run.checkpoint(number), net, optimizer)
    checkpoint.prune(run, keep=3)
    assert run_dir.checkpoints(run) == [run.checkpoint(n) for n in (20, 30, 40)]
    run_dir.drop_after(run, 25)
    assert run_dir.checkpoints(run) == [run.checkpoint(20)]
