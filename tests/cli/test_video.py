import json
from pathlib import Path

import imageio_ffmpeg
import pytest
from PIL import Image
from typer.testing import CliRunner

from vlarl import result_file
from vlarl.testing.token_policy import TokenConfig, TokenPolicy
from vlarl.testing.toy import write
from vlarl_cli.main import app

PLUGINS = Path(__file__).parent / "plugins"


def policy(seed):
    folder = Path("toy")
    write(folder, TokenPolicy(TokenConfig(seed=seed)).module.state_dict())
    (folder / "config.json").write_text('{"model_type": "toy"}')


@pytest.fixture
def result(tmp_path, monkeypatch):
    """A result of the toy policy, some successes and some failures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(PLUGINS))
    policy(3)
    words = ["eval", "./toy", "--suite", "toy_both", "--temperature", "1", "--out", "r.json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found = result_file.load(Path("r.json"))
    assert 0 < found.total.k < found.total.n
    return found


def video(*args, code=0):
    done = CliRunner().invoke(app, ["video", *map(str, args)])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.stderr
    return done


def size_of(path):
    reader = imageio_ffmpeg.read_frames(str(path))
    return next(reader)["source_size"]


def test_episodes_are_played_again_with_the_recorded_outcome(result):
    done = video("r.json", "--json", "--num-slots", 3)
    found = json.loads(done.stdout)
    assert found["changed"] == []
    assert len(found["episodes"]) == 8
    assert found["out"] == "r_replay.mp4"
    wide, high = size_of("r_replay.mp4")
    cell = 160, 160 + 34
    assert (wide // 4, high // 2) == (cell[0] + 4, cell[1])


def test_only_failures_or_given_episodes_are_shown(result):
    failed = [i for i, e in enumerate(result.episodes) if not e.success]
    found = json.loads(video("r.json", "--only", "failures", "--grid", "8x8", "--json").stdout)
    assert found["episodes"] == failed
    assert found["out"] == "r_failures_replay.mp4"
    found = json.loads(video("r.json", "--episodes", "9,2", "--out", "two.mp4", "--json").stdout)
    assert found["episodes"] == [2, 9]
    assert size_of("two.mp4")[0] == 2 * 164


def test_a_strip_is_a_picture(result):
    video("r.json", "--episodes", "2,9", "--strip", "--out", "s.png")
    assert Image.open("s.png").size == (6 * 164, 2 * 194)


def test_another_policy_in_the_folder_is_noticed(result):
    policy(4)
    done = video("r.json", "--grid", "8x2", "--json")
    assert "has changed since the evaluation" in done.stderr
    changed = json.loads(done.stdout)["changed"]
    assert changed
    assert "then" in changed[0]
    assert "another outcome than recorded: " + changed[0] in done.stderr


def test_nothing_is_overwritten_unless_asked_and_a_dry_run_writes_nothing(result):
    video("r.json", "--dry-run")
    assert not list(Path().glob("*.mp4"))
    Path("v.mp4").write_text("mine")
    assert "v.mp4 exists" in video("r.json", "--out", "v.mp4", code=2).stderr
    assert "v.mp4 is a file" in video("r.json", "--out", "v.mp4/w.mp4", code=2).stderr
    assert Path("v.mp4").read_text() == "mine"
    video("r.json", "--episodes", "1", "--out", "v.mp4", "--overwrite", "-q")
    assert Path("v.mp4").read_bytes()[4:8] == b"ftyp"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("none.json",), 3, "there is no run or result file none.json"),
        (("toy",), 2, "has no evaluation results"),
        (("toy/config.json",), 1, "is not a result of `vlarl eval`"),
        (("r.json", "--episodes", "99"), 2, "99 not among the 16 played episodes"),
        (("r.json", "--episodes", "x"), 2, "'x' is no position"),
        (("r.json", "--grid", "4"), 2, "'4' is no layout"),
    ],
)
def test_bad_requests_are_one_message(result, words, code, message):
    done = video(*words, code=code)
    assert message in done.stderr
    assert done.stdout == ""
    assert not list(Path().glob("*.mp4"))


@pytest.mark.parametrize("section", ["env", "policy", "sampling"])
def test_a_protocol_without_a_section_is_one_message(result, section):
    document = json.loads(Path("r.json").read_text())
    del document["protocol"][section]
    Path("r.json").write_text(json.dumps(document))
    assert f"does not say which {section} was used" in video("r.json", code=2).stderr


def test_a_result_without_its_checkpoint_is_an_error(result):
    Path("toy").rename("gone")
    done = video("r.json", code=3)
    assert "toy" in done.stderr
