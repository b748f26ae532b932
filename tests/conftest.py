"""Fixtures for all tests; `pytest --update-golden` rewrites tests/golden instead of comparing."""

import itertools
import os
from pathlib import Path

import pytest

from vlarl import registry, run_dir
from vlarl.config import resolved
from vlarl.config.compose import build, compose

GOLDEN = Path(__file__).parent / "golden"

TOY_RUN = """
env: {name: reach, chunk: 2, num_slots: 5}
policy: {name: token_toy, chunk: 2, hidden: 16}
algo: {name: grpo, group_size: 4}
rollout: {episodes: 16}
optim: {lr: 0.02, minibatches: 2, micro_batch: 8}
eval: {every: 2, episodes: 3, video: 0}
save: {every: 1}
log: {tensorboard: false}
compute: {device: cpu, threads: 1}
max_steps: 4
"""
"""A training run of about a second."""


def pytest_configure():
    # Before torch is loaded: pytest-xdist fills the cores, and more threads only get in each
    # other's way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite golden files instead of comparing"
    )


@pytest.fixture
def check_golden(request):
    """check_golden(name, text): the text equals tests/golden/NAME, or becomes it."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing; write it with pytest --update-golden"
        assert text == path.read_text(encoding="utf-8"), f"{name} changed; pytest --update-golden"

    return check


@pytest.fixture
def toys(monkeypatch):
    """The env and the policy of vlarl.testing, registered as `reach` and `token_toy`."""
    monkeypatch.setitem(registry._BUILT_IN["env"], "reach", "vlarl.testing.reach")
    monkeypatch.setitem(registry._BUILT_IN["policy"], "token_toy", "vlarl.testing.token_policy")


@pytest.fixture
def toy_run(toys, tmp_path):
    """toy_run("max_steps=3", ...): a run directory of its own, prepared for the worker."""
    numbers = itertools.count()

    def prepare(*overrides):
        preset = tmp_path / "toy.yaml"
        preset.write_text(TOY_RUN)
        composed = compose(preset, overrides)
        folder = run_dir.create(tmp_path / f"run-{next(numbers)}")
        folder.config.write_text(resolved.dump(build(composed), composed.sources))
        return folder

    return prepare
