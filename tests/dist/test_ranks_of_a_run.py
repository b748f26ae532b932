"""A whole run on two ranks is the run of one rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from vlarl import metrics, run_dir
from vlarl.result_file import load

TOYS = Path(__file__).parent / "plugins"

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]


def train(folder, ranks):
    """As torchrun starts it; the toys are registered in its processes."""
    paths = [str(TOYS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *(torchrun if ranks > 1 else []), "-m", "vlarl.worker", folder.path],
        capture_output=True, text=True, check=False, env=environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    assert [(note.rank, note.code) for note in sorted(run_dir.read_exits(folder), key=rank_of)] == [
        (rank, 0) for rank in range(ranks)
    ]
    return [metrics.strip_timing(line) for line in metrics.read(folder.metrics)]


def rank_of(note):
    return note.rank


@pytest.mark.parametrize("algo", ["algo={name: grpo, group_size: 4}", "algo={name: ppo}"])
def test_two_ranks_play_and_learn_what_one_does(toy_run, algo):
    overrides = (algo, "max_steps=2", "eval.every=1")
    one, two = toy_run(*overrides), toy_run(*overrides)
    alone, both = train(one, 1), train(two, 2)
    assert both[0] == alone[0], "the first evaluation"
    # The first rollout is played with the same weights, hence the same episodes; losses and
    # gradients are the same sums in another order.
    assert both[1].keys() == alone[1].keys()
    assert both[1] == pytest.approx(alone[1], abs=1e-5)
    assert alone[1]["train/actor/grad_norm"] > 1e-3
    before = (load(folder.eval / "step_000000.json").episodes for folder in (one, two))
    assert len({json.dumps([str(e) for e in episodes]) for episodes in before}) == 1
    a, b = (
        load_file(run_dir.latest_checkpoint(folder) / "policy" / "model.safetensors")
        for folder in (one, two)
    )
    # Adam divides by the root of tiny second moments, which magnifies the last bit.
    assert all((a[name] - b[name]).abs().max() < 1e-3 for name in a)
