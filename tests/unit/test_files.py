"""What stands in the way is kept, under a name that says so."""

from pathlib import Path

from moebius.files import unused_name


def test_a_folder_gets_the_first_free_number(tmp_path: Path) -> None:
    assert unused_name(tmp_path / "qwen2.5") == tmp_path / "qwen2.5.previous-1"
    for name in ("qwen2.5", "qwen2.5.previous-1"):
        (tmp_path / name).mkdir()
    assert unused_name(tmp_path / "qwen2.5") == tmp_path / "qwen2.5.previous-2"


def test_a_file_keeps_its_suffix(tmp_path: Path) -> None:
    for name in ("arguments.json", "arguments.previous-1.json"):
        (tmp_path / name).write_text("{}")
    assert unused_name(tmp_path / "arguments.json") == tmp_path / "arguments.previous-2.json"
