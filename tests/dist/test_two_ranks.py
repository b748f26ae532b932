"""One process, two replicas and two shards must do the same thing."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

JOBS = Path(__file__).with_name("dist_jobs.py")
MODES = ["none", "fsdp2", "fsdp2+recompute"]

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(180)]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def launch(jobs: str, folder: Path, ranks: int, mode: str) -> None:
    """What torchrun does, without importing torch once more."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if ranks > 1:
        size = str(ranks)
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        env |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    processes = []
    for rank in map(str, range(ranks)):
        own = {**env, "RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else env
        with (folder / f"{jobs[:40]}-{rank}.log").open("w") as log:
            command = [sys.executable, str(JOBS), jobs, str(folder), mode]
            processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
    end = time.monotonic() + 150
    try:
        while any(p.poll() is None for p in processes):
            logs = "\n".join(path.read_text()[-3000:] for path in folder.glob("*.log"))
            assert time.monotonic() < end, f"the ranks hang\n{logs}"
            assert not any(p.poll() for p in processes), logs
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [p.returncode for p in processes] == [0] * ranks


@dataclass
class Played:
    """What a launch left behind, read back."""

    folder: Path

    def __getitem__(self, job: str) -> Any:
        return torch.load(self.folder / f"{job}.pt", weights_only=True)


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Played]:
    """All jobs for a number of ranks and a mode, in one launch each: starting up is what costs."""

    @cache
    def once(ranks: int, mode: str) -> Played:
        folder = tmp_path_factory.mktemp(f"ranks{ranks}-{mode}")
        jobs = "gradients,train,uneven_rollout,save,policy"
        if ranks > 1:
            jobs += ",world,one_rank_fails" + (",one_sided_gradient" if mode == "none" else "")
        few = {"fsdp2+recompute": "gradients,policy", "fsdp2+bf16": "policy"}
        launch(
            "train" if (ranks, mode) == (1, "fsdp2") else few.get(mode, jobs), folder, ranks, mode
        )
        return Played(folder)

    return once


def resume(played: Played, folder: Path, ranks: int, mode: str) -> Any:
    shutil.copytree(played.folder / "step_000002", folder / "step_000002")
    launch("resume", folder, ranks, mode)
    return Played(folder)["resume"]


def close(a: dict, b: dict, atol: float) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert (tensor is None) == (b[name] is None), name
        if tensor is not None:
            torch.testing.assert_close(tensor, b[name], atol=atol, rtol=0, msg=name)


def equal(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


Play = Callable[[int, str], Played]


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_sum_to_the_gradient_of_one(mode: str, play: Play) -> None:
    alone, both = play(1, "none")["gradients"], play(2, mode)["gradients"]
    assert alone["norm"] > 1, "the clip must bite"
    torch.testing.assert_close(both["loss"], alone["loss"], atol=1e-6, rtol=0)
    torch.testing.assert_close(both["norm"], alone["norm"], atol=1e-6, rtol=0)
    close(both["grads"], alone["grads"], atol=1e-6)
    close(both["clipped"], alone["clipped"], atol=1e-6)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_real_policy_learns_the_same_on_two_ranks(mode: str, lora: bool, play: Play) -> None:
    one, two = (play(ranks, m)["policy"][f"lora={lora}"] for ranks, m in ((1, "none"), (2, mode)))
    assert torch.equal(one["token"], two["token"]), "sampling must not depend on the ranks"
    assert two["drift"] < 1e-5, "act and evaluate must agree"
    torch.testing.assert_close(two["loss"], one["loss"], rtol=1e-6, atol=0)
    torch.testing.assert_close(two["norm"], one["norm"], rtol=1e-6, atol=0)
    # Float32 sums in another order: relative to the whole gradient.
    close(two["grads"], one["grads"], atol=1e-6 * float(one["norm"]))


def test_bfloat16_shards_stay_close_and_adapters_mix_with_frozen_weights(play: Play) -> None:
    one, two = play(1, "none")["policy"], play(2, "fsdp2+bf16")["policy"]
    for kind in ("lora=False", "lora=True"):
        assert two[kind]["drift"] < 0.05, "bf16 has 8 bits"
        torch.testing.assert_close(two[kind]["loss"], one[kind]["loss"], rtol=0.05, atol=0)
        assert {g.dtype for g in two[kind]["grads"].values()} == {torch.float32}


def test_a_sharded_policy_is_saved_like_a_whole_one(play: Play) -> None:
    whole, shards = play(1, "none").folder, play(2, "fsdp2").folder
    for name in ("saved-False", "saved-True"):
        files = {p.name: p.read_bytes() for p in (whole / name).iterdir()}
        assert any(file.endswith(".safetensors") for file in files)
        assert files == {p.name: p.read_bytes() for p in (shards / name).iterdir()}


@pytest.mark.parametrize(("ranks", "mode"), [(2, "none"), (2, "fsdp2"), (1, "fsdp2")])
def test_training_does_not_depend_on_the_layout(ranks: int, mode: str, play: Play) -> None:
    one, other = play(1, "none")["train"], play(ranks, mode)["train"]
    for a, b in zip(one["log"], other["log"], strict=True):
        close(a, b, atol=1e-5)
    # Adam divides by the root of tiny second moments, which magnifies the last bit.
    close(one["state"], other["state"], atol=2e-5)


def test_ranks_may_play_different_numbers_of_forwards(play: Play) -> None:
    one, two = play(1, "none")["uneven_rollout"], play(2, "fsdp2")["uneven_rollout"]
    for a, b in zip(one["answers"], two["answers"], strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
    assert (one["answers"][0] - one["answers"][2]).abs().max() > 1e-2, "weights must have moved"


def test_a_gradient_on_one_rank_counts_and_none_anywhere_stays_none(play: Play) -> None:
    grads = play(2, "none")["one_sided_gradient"]
    assert grads["value.bias"].tolist() == [12.0]
    assert grads["head.bias"].tolist() == [12.0, 12.0, 12.0]
    assert grads["frozen.weight"] is None


def test_world_collectives(play: Play) -> None:
    got = play(2, "none")["world"]
    assert got["sum"].tolist() == [3, 30]
    assert got["max"].tolist() == [-1, -10]
    assert got["mine"].tolist() == [1, 10], "the argument must stay as it was"
    assert got["gather"] == [{"rank": 0}, {"rank": 1}]
    assert got["all"] == [0, 1]
    assert got["box"] == "from 0"


@pytest.mark.parametrize("mode", ["none", "fsdp2"])
def test_resume_is_bit_equal_to_an_unbroken_run(mode: str, play: Play, tmp_path: Path) -> None:
    unbroken = play(2, mode)["save"]
    resumed = resume(play(2, mode), tmp_path, 2, mode)
    for a, b in zip(unbroken["log"][2:], resumed["log"], strict=True):
        equal(a, b)
    equal(unbroken["state"], resumed["state"])
    assert [d.tolist() for d in unbroken["draws"]] == [d.tolist() for d in resumed["draws"]]


@pytest.mark.parametrize(
    ("wrote", "reads"), [((2, "fsdp2"), (1, "none")), ((1, "none"), (2, "fsdp2"))]
)
def test_another_number_of_ranks_resumes(
    wrote: Any, reads: Any, play: Play, tmp_path: Path
) -> None:
    unbroken = play(*wrote)["save"]
    resumed = resume(play(*wrote), tmp_path, *reads)
    close(unbroken["state"], resumed["state"], atol=2e-5)
    policy = torch.load(tmp_path / "step_000002" / "policy" / "weights.pt", weights_only=True)
    assert policy.keys() == unbroken["state"].keys()


def test_one_failing_rank_stops_the_save_on_all(play: Play) -> None:
    played = play(2, "none")
    told = played["one_rank_fails"]
    assert len(told) == 2
    assert all("disk of rank 1 is full" in text for text in told), told
    assert not list(played.folder.glob("step_000099*"))
