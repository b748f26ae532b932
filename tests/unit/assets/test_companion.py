"""The note of the env beside a checkpoint."""

import pytest

from vlarl.assets import companion
from vlarl.errors import CorruptFile
from vlarl.eval_setup import Wanted, set_up


def test_what_belongs_to_one_run_is_left_out(tmp_path):
    section = {"name": "metaworld", "frame_size": 64, "num_slots": 4, "tasks": ["reach-v3"]}
    companion.write_env(tmp_path, section)
    assert companion.read_env(tmp_path) == {"name": "metaworld", "frame_size": 64}


def test_a_checkpoint_without_a_note_is_fine(tmp_path):
    assert companion.read_env(tmp_path) == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"frame_size": 64}', '{"name": 3}'])
def test_a_damaged_note_is_named(tmp_path, text):
    (tmp_path / companion.FILE).write_text(text)
    with pytest.raises(CorruptFile, match=companion.FILE):
        companion.read_env(tmp_path)


def test_a_bare_checkpoint_is_evaluated_in_the_env_it_was_made_for(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "openvla"}')
    companion.write_env(tmp_path, {"name": "metaworld", "frame_size": 64, "max_steps": 99})
    wanted = Wanted(checkpoint=str(tmp_path), suite="mt50", overrides=("env.max_steps=50",))
    job, _ = set_up(wanted, out=lambda *_: tmp_path / "out.json")
    assert (job.env.frame_size, job.env.max_steps, job.env.suite) == (64, 50, "mt50")
