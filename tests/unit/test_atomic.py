import errno

import pytest

from vlarl.atomic import new_file, write_atomic
from vlarl.errors import ConfigError


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("durable", [True, False])
def test_write_atomic_replaces_text_and_bytes(tmp_path, durable):
    path = tmp_path / "a.json"
    write_atomic(path, "größer", durable=durable)
    assert path.read_text(encoding="utf-8") == "größer"
    write_atomic(path, b"\x00\n", durable=durable)
    assert path.read_bytes() == b"\x00\n"
    assert listing(tmp_path) == ["a.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    path.mkdir()
    with pytest.raises(OSError, match=r"a\.json"):
        write_atomic(path, "new")
    assert listing(tmp_path) == ["a.json"]
    with pytest.raises(FileNotFoundError), new_file(tmp_path / "b.txt"):
        (tmp_path / "missing").read_text()
    assert listing(tmp_path) == ["a.json"]


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path):
    path = tmp_path / "a.txt"

    def write():
        with new_file(path) as draft:
            draft.write_text("mine")
            path.write_text("theirs")

    with pytest.raises(ConfigError, match="not overwritten"):
        write()
    assert path.read_text() == "theirs"
    assert listing(tmp_path) == ["a.txt"]


def test_a_full_disk_is_named_by_the_file_it_lacks_room_for(tmp_path):
    with pytest.raises(OSError, match="No space left") as caught, new_file(tmp_path / "a.npy"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "a.npy")
    assert list(tmp_path.iterdir()) == []
