"""The example of docs/extending/env.md is a working env."""

import importlib
import re
from pathlib import Path

from vlarl.episode import Episode
from vlarl.testing import check_env

PAGE = Path(__file__).parents[3] / "docs" / "extending" / "env.md"


def test_the_documented_env_keeps_the_contract(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["line_sim.py", "line.py"]
    for name, code in blocks:
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    line = importlib.import_module("line")
    cfg = line.Config()
    trial_ids = line.trials(cfg, "train")["go-right"]
    assert not set(trial_ids) & set(line.trials(cfg, "eval")["go-right"])
    check_env(
        lambda n: line.make(cfg, num_slots=n, final_frames=True),
        [Episode(task="go-right", trial=trial, index=trial) for trial in trial_ids[1:3]],
        chunk=4,
    )
