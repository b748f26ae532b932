import pytest

from vlarl import errors


@pytest.mark.parametrize("name", ["ConfigError", "WorkerDied", "DeviceMissing"])
def test_an_error_is_rebuilt_from_its_name(name):
    error = errors.rebuilt(name, "why", "do this")
    assert type(error) is getattr(errors, name)
    assert str(error) == "why"
    assert getattr(error, "fix", None) == ("do this" if name == "DeviceMissing" else None)


@pytest.mark.parametrize("name", ["ValueError", "annotations", "rebuilt", ""])
def test_other_names_are_no_errors_of_ours(name):
    assert errors.rebuilt(name, "why") is None
