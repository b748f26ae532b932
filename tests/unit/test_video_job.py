"""Which result file is played again."""

import os

import pytest

from vlarl.errors import AssetMissing, ConfigError
from vlarl.video_job import find_result


def test_the_newest_result_of_a_run_is_taken_and_no_draft(tmp_path):
    (tmp_path / "eval").mkdir()
    for age, name in enumerate((".step_3.1f2e.json", "step_2.json", "step_1.json")):
        path = tmp_path / "eval" / name
        path.write_text("{}")
        os.utime(path, (1000 - age, 1000 - age))
    assert find_result(tmp_path).name == "step_2.json"
    assert find_result(tmp_path / "eval" / "step_1.json").name == "step_1.json"


def test_a_run_with_nothing_but_a_draft_has_no_result(tmp_path):
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / ".step_3.1f2e.json").write_text("{}")
    with pytest.raises(ConfigError, match="no evaluation results"):
        find_result(tmp_path)
    with pytest.raises(AssetMissing, match="no run or result file"):
        find_result(tmp_path / "typo")
