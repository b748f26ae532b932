"""Downloads by the real client from a hub on this machine."""

import hashlib
import json
import os
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from vlarl.assets import manifest, record, store
from vlarl.assets.download import download
from vlarl.assets.download_plan import check_space, part_of, plan
from vlarl.errors import AssetMissing, ConfigError, CorruptFile, DownloadFailed, MissingError

COMMIT = "c0ffee" * 6 + "c0ff"
TOKEN = "hf_SecretSecretSecret"
WANTED = {"config.json", "empty.txt", "model.safetensors", "dataset/a.npy", "dataset/b.npy"}


def contents(folder):
    paths = (p for p in folder.rglob("*") if p.is_file() and p.name != record.FILE)
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in paths}


def wanted(hub, repo="o/duck"):
    return {path: data for path, data in hub.repos[repo].items() if path in WANTED}


def get(name="duck", **kwargs):
    made = plan(name, **kwargs)
    assert download(made)
    return made.folder


@pytest.fixture
def quick(monkeypatch):
    """The client's own pauses before it asks again take no time."""
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)


def test_a_complete_download_is_what_the_hub_holds(duck):
    counted = []
    made = plan("duck")
    assert made.commit == COMMIT
    assert made.num_bytes == made.bytes_to_fetch == sum(map(len, wanted(duck).values()))
    assert {f.path for f in made.files} == WANTED
    assert not made.folder.parent.exists()
    assert download(made, on_bytes=counted.append)
    assert sum(counted) == made.num_bytes
    assert contents(made.folder) == wanted(duck)
    assert [p.name for p in made.folder.parent.iterdir() if p.name[0] != "."] == ["duck"]
    assert not (made.folder.parent / ".duck.partial").exists()
    assert store.resolve("duck") == made.folder
    note = record.read(made.folder)
    assert (note.repo, note.commit, set(note.files)) == ("o/duck", COMMIT, WANTED)
    model = duck.repos["o/duck"]["model.safetensors"]
    assert note.files["model.safetensors"].sha256 == hashlib.sha256(model).hexdigest()
    header = b"blob 8\0"
    assert note.files["config.json"].git_sha1 == hashlib.sha1(header + b'{"a": 1}').hexdigest()


def test_what_is_complete_is_verified_without_the_hub(duck, monkeypatch):
    get()
    duck.seen.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = plan("duck")
    assert again.is_complete
    assert again.bytes_to_fetch == 0
    assert download(again)
    assert duck.seen == []


@pytest.mark.parametrize("cut", [12_345, 49_999])
def test_a_broken_line_is_resumed_by_a_range_request(duck, quick, cut):
    duck.faults["model.safetensors"] = [("cut", cut)]
    folder = get()
    assert contents(folder) == wanted(duck)
    first, second = duck.gets("/cdn/o/duck/model")
    assert first.range is None
    assert second.range == f"bytes={cut // 1000 * 1000}-"


def test_another_process_resumes_what_was_interrupted(duck):
    made = plan("duck")
    came = 0

    def count(num_bytes):
        nonlocal came
        came += num_bytes

    assert not download(made, on_bytes=count, should_stop=lambda: came > 30_000)
    assert not made.folder.exists()
    with pytest.raises(AssetMissing, match="asset 'duck' is not in"):
        store.resolve("duck")
    duck.seen.clear()
    again = plan("duck")
    kept = {f.path: f.have for f in again.files}["model.safetensors"]
    assert 20_000 < kept < 50_000
    assert again.bytes_to_fetch == again.num_bytes - sum(f.have for f in again.files)
    counted = []
    assert download(again, on_bytes=counted.append)
    assert sum(counted) == again.bytes_to_fetch
    assert [g.range for g in duck.gets("/cdn/o/duck/model")] == [f"bytes={kept}-"]
    assert contents(made.folder) == wanted(duck)


def test_what_came_of_another_version_is_not_mixed_in(duck):
    """The branch moved in between: a file changed, one went, one came; our own file stays."""
    came = []
    made = plan("duck")
    files = duck.repos["o/duck"]
    assert not download(made, on_bytes=came.append, should_stop=lambda: sum(came) > 30_000)
    draft = made.folder.parent / ".duck.partial"
    (draft / "empty.txt").touch()
    (draft / "mine.txt").write_text("x")
    assert list(draft.glob(".model.safetensors.*.part"))
    files["model.safetensors"] = bytes(40_000)
    del files["empty.txt"]
    files["config.json"] = b'{"a": 2}'
    duck.seen.clear()
    assert contents(get()) == wanted(duck) | {"mine.txt": b"x"}
    assert {s.range for s in duck.gets("/cdn/o/duck/model")} == {None}


def test_a_server_without_ranges_sends_all_of_it_again(duck, quick):
    duck.faults["model.safetensors"] = [("cut", 10_000), "whole"]
    counted = []
    made = plan("duck")
    download(made, on_bytes=counted.append)
    assert contents(made.folder) == wanted(duck)
    assert sum(counted) == made.num_bytes


def test_a_truncated_answer_is_noticed_and_completed(duck):
    duck.faults["model.safetensors"] = [("short", 20_000)]
    assert contents(get()) == wanted(duck)
    assert duck.gets("/cdn/o/duck/model")[-1].range == "bytes=20000-"


@pytest.mark.parametrize("path", ["model.safetensors", "config.json"])
def test_a_wrong_hash_is_fetched_again_once(duck, path):
    duck.faults[path] = ["other"]
    counted = []
    made = plan("duck")
    assert download(made, on_bytes=counted.append)
    assert contents(made.folder) == wanted(duck)
    assert sum(counted) == made.num_bytes
    duck.faults[path] = ["other", "other"]
    with pytest.raises(DownloadFailed, match=f"{path} of o/duck arrived twice without the hash"):
        get(force=True)
    assert contents(store.home() / "duck") == wanted(duck)


def test_a_part_with_rot_in_it_is_not_trusted(duck):
    made = plan("duck")
    file = next(f.hub for f in made.files if f.path == "model.safetensors")
    part = part_of(made.folder.parent / ".duck.partial/model.safetensors", file)
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(30_000))
    assert contents(get()) == wanted(duck)
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(60_000))
    assert contents(get(force=True)) == wanted(duck)


@pytest.mark.parametrize("status", [500, 503, 429])
def test_passing_failures_are_tried_again(duck, quick, status):
    duck.faults["revision"] = [status] * 3
    duck.faults["tree"] = [status]
    duck.faults["config.json"] = [status] * 3
    assert contents(get()) == wanted(duck)


def test_lasting_failures_end_in_one_message(duck, quick):
    duck.faults["revision"] = [503] * 4
    with pytest.raises(DownloadFailed) as caught:
        plan("duck")
    assert str(caught.value) == f"{duck.url} answered 503 about o/duck; gave up after 4 attempts"
    duck.faults["model.safetensors"] = [502] * 4
    with pytest.raises(DownloadFailed, match=r"502 about model.safetensors of o/duck; gave up"):
        get()
    assert not (store.home() / "duck").exists()
    assert contents(get()) == wanted(duck)


def test_a_hub_without_such_a_repository_or_revision(duck):
    assert plan("duck", revision=COMMIT).commit == COMMIT
    with pytest.raises(ConfigError, match="o/duck has no revision 'v9' at http"):
        plan("duck", revision="v9")
    del duck.repos["o/duck"]
    with pytest.raises(DownloadFailed, match=r"o/duck is not at http.*\(404\)"):
        plan("duck")


def test_a_repository_that_lacks_what_the_manifest_expects(duck):
    del duck.repos["o/duck"]["dataset/b.npy"]
    with pytest.raises(DownloadFailed, match=r"no dataset/\*\.npy \(1 of 2\)"):
        plan("duck")
    duck.repos["o/duck"]["dataset/b.npy"] = b"longer than promised"
    with pytest.raises(DownloadFailed, match=r"no dataset/\*\.npy \(2020 of 2005 bytes\)"):
        plan("duck")


def test_a_hash_of_the_manifest_is_held_against_the_hub(duck, monkeypatch):
    swan = manifest.get("swan")
    strict = {"pattern": "model.safetensors", "what": "w", "count": 1, "sha256": "0" * 64}
    other = manifest.Asset(**swan.model_dump(exclude={"files"}), files=[strict])
    monkeypatch.setattr(manifest, "_read", lambda: {"swan": other})
    with pytest.raises(DownloadFailed, match=r"no model\.safetensors with the hash 0000"):
        plan("swan")


def test_a_gated_repository_says_how_to_log_in(duck, monkeypatch):
    duck.needs_token.add("o/duck")
    with pytest.raises(MissingError) as caught:
        plan("duck")
    assert caught.value.fix == "hf auth login"
    assert "o/duck is gated (401" in str(caught.value)
    assert "no token is set" in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(MissingError, match="the token that is set gives no access") as caught:
        plan("duck")
    assert "hf_wrong" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert contents(get()) == wanted(duck)


def test_the_token_goes_to_the_hub_and_nowhere_else(duck, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    get()
    assert {s.token for s in duck.gets("/resolve/")} == {f"Bearer {TOKEN}"}
    assert {s.token for s in duck.gets("/cdn/")} == {None}
    assert TOKEN not in (store.home() / "duck" / record.FILE).read_text()


def test_offline_what_is_missing_is_named(duck, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    made = plan("duck")
    assert made.commit is None
    assert [f.path for f in made.files][-1] == "dataset/*.npy (2 files)"
    assert made.num_bytes is None
    with pytest.raises(AssetMissing) as caught:
        download(made)
    assert "offline mode is on (HF_HUB_OFFLINE)" in str(caught.value)
    assert "missing of duck: config.json, *.safetensors, dataset/*.npy (2 files)" in str(
        caught.value
    )
    assert caught.value.fix == "HF_HUB_OFFLINE=0 vlarl download duck"


def test_offline_only_what_is_missing_is_named(duck, monkeypatch):
    folder = get()
    (folder / "dataset/a.npy").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(AssetMissing, match=r"missing of duck: dataset/a.npy$"):
        get()


def test_a_hub_that_is_not_there(duck, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    made = plan("duck")
    assert made.unreachable == "no answer from http://127.0.0.1:9 about o/duck (ConnectError)"


def test_a_web_page_is_no_hub(duck, monkeypatch):
    from huggingface_hub import HfApi

    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: json.loads("<html>"))
    with pytest.raises(DownloadFailed, match="does not answer as a hub does"):
        plan("duck")


def test_a_small_disk_is_refused_with_both_numbers(duck, monkeypatch):
    usage = SimpleNamespace(free=52_012)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    made = plan("duck")
    assert made.bytes_to_fetch == 52_013
    with pytest.raises(
        MissingError, match=r"duck needs 52\.0 kB but .* has 52\.0 kB free"
    ) as caught:
        check_space([made])
    assert caught.value.fix == "vlarl download duck --to /a/larger/disk"
    with pytest.raises(MissingError, match="needs"):
        download(made)
    assert duck.gets("/resolve/") == []
    usage.free = 52_013
    assert check_space([made]) == (52_013, 52_013)
    with pytest.raises(MissingError, match=r"duck swan needs 57\.0 kB"):
        check_space([made, plan("swan")])


def test_force_replaces_only_when_all_is_there(duck):
    folder = get()
    (folder / "mine.txt").write_text("x")
    duck.seen.clear()
    made = plan("duck", force=True)
    assert made.bytes_to_fetch == made.num_bytes
    assert not download(made, should_stop=lambda: True)
    assert (folder / "mine.txt").exists()
    assert store.resolve("duck") == folder
    assert download(plan("duck", force=True))
    assert contents(folder) == wanted(duck)
    assert len(duck.gets("/cdn/o/duck/model")) >= 1


def test_force_overcomes_a_damaged_note(duck):
    folder = get()
    (folder / record.FILE).write_text("{")
    for look in (lambda: plan("duck"), lambda: store.resolve("duck")):
        with pytest.raises(CorruptFile, match="is damaged; delete it and download again"):
            look()
    assert contents(get(force=True)) == wanted(duck)


@pytest.mark.parametrize("harm", ["truncate", "delete", "rot"])
def test_what_was_damaged_later_is_repaired(duck, harm):
    path = get() / "model.safetensors"
    if harm == "truncate":
        os.truncate(path, 100)
    elif harm == "delete":
        path.unlink()
    else:
        path.write_bytes(bytes(50_000))
    if harm != "rot":  # contents are not read when a name is looked up
        with pytest.raises(AssetMissing, match=r"not complete: no model\.safetensors") as caught:
            store.resolve("duck")
        assert caught.value.fix == "vlarl download duck"
    made = plan("duck")
    assert made.bytes_to_fetch == 50_000
    assert download(made)
    assert contents(made.folder) == wanted(duck)


def test_another_revision_than_the_one_here_needs_force(duck):
    folder = get(revision="main")
    with pytest.raises(ConfigError, match=f"holds commit {COMMIT}, not 'v2'; --force"):
        plan("duck", revision="v2")
    assert plan("duck", revision=COMMIT).folder == folder


def test_files_fetched_by_hand_are_kept_when_they_are_the_hubs(duck):
    folder = store.home() / "duck"
    folder.mkdir(parents=True)
    model = duck.repos["o/duck"]["model.safetensors"]
    (folder / "model.safetensors").write_bytes(model)
    with pytest.raises(AssetMissing, match=r"no config.json, no dataset/\*.npy \(2 files\)"):
        store.resolve("duck")
    made = plan("duck")
    assert made.bytes_to_fetch == made.num_bytes - len(model)
    assert download(made)
    assert contents(folder) == wanted(duck)
    assert duck.gets("/cdn/o/duck/model") == []


def test_files_of_somebody_else_are_not_replaced(duck):
    folder = store.home() / "duck"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("my own")
    with pytest.raises(ConfigError, match="was not made by `vlarl download` and differs"):
        plan("duck")
    assert (folder / "config.json").read_text() == "my own"
    assert contents(get(force=True)) == wanted(duck)


def test_a_folder_that_came_up_beside_a_draft_is_not_replaced(duck):
    download(plan("duck"), should_stop=lambda: True)
    (store.home() / "duck").mkdir()
    (store.home() / "duck" / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="was interrupted before; --force replaces it"):
        plan("duck")


def test_a_file_in_the_way_is_named(duck):
    store.home().mkdir(parents=True)
    (store.home() / "duck").write_text("")
    with pytest.raises(ConfigError, match="is a file; remove it"):
        plan("duck")


def test_another_folder_and_a_link(duck, tmp_path):
    folder = get(to=tmp_path / "disk")
    assert folder == tmp_path / "disk" / "duck"
    assert store.resolve(folder) == folder
    store.home().mkdir(parents=True)
    (store.home() / "duck").symlink_to(folder)
    assert plan("duck").is_complete
    assert get(force=True) == store.home() / "duck"
    assert not (store.home() / "duck").is_symlink()
    assert contents(folder) == wanted(duck)


def test_two_at_once_fetch_it_once(duck):
    plans = [plan("duck"), plan("duck")]
    threads = [threading.Thread(target=download, args=(p,)) for p in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contents(plans[0].folder) == wanted(duck)
    assert len(duck.gets("/cdn/o/duck/model")) == 1


def test_a_path_out_of_the_folder_is_refused(duck):
    duck.repos["o/duck"]["../evil"] = b"x"
    with pytest.raises(DownloadFailed, match=r"lists '\.\./evil', which would leave the folder"):
        plan("duck")


def test_a_stopped_download_stops_soon(duck):
    duck.faults["model.safetensors"] = [("pause", 20_000)]
    stop = threading.Event()
    result = []

    def run():
        result.append(download(plan("duck"), should_stop=stop.is_set))

    thread = threading.Thread(target=run)
    thread.start()
    assert duck.paused.wait(20)
    stop.set()
    duck.go.set()
    start = time.monotonic()
    thread.join(20)
    assert result == [False]
    assert time.monotonic() - start < 5
