"""The count of code lines that `make lint` prints."""

import pytest

from tools import code_lines

MODULE = '''"""A docstring
of two lines."""

# a comment
NAME = """a text
of two lines"""


def double(value: int) -> int:
    """Twice the value."""
    return 2 * value  # with a comment
'''


def test_comments_docstrings_and_blank_lines_are_no_code() -> None:
    assert code_lines.code_lines(MODULE) == 4


def test_a_whole_above_its_cap_fails(monkeypatch, capsys, tmp_path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    monkeypatch.setattr(code_lines, "SOURCES", tmp_path)
    code_lines.main()
    assert f"cap {code_lines.CAP:,} (+" in capsys.readouterr().out
    monkeypatch.setattr(code_lines, "CAP", 3)
    with pytest.raises(SystemExit, match="src is above its cap"):
        code_lines.main()
