"""Every attack has a word on the command line, a note, and a line in the documents."""

from pathlib import Path
from typing import get_args

from atlas_fl.cli.options import PrivacyAttackName
from atlas_fl.cli.results import FLAGS_OF_NO_USE
from atlas_fl.privacy_attacks.registry import CUTS, PRIVACY_ATTACKS
from atlas_fl.report.tables import ATTACK_NOTES

PAGE = Path(__file__).parents[2] / "docs/algorithms/attacks.md"


def test_every_attack_has_a_word_a_note_and_a_line_in_the_documents() -> None:
    names = {*PRIVACY_ATTACKS, CUTS}
    assert names == {*get_args(PrivacyAttackName)} == FLAGS_OF_NO_USE.keys()
    assert ATTACK_NOTES.keys() == PRIVACY_ATTACKS.keys()
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in sorted(names) if f"**`{name}`**" not in page] == []
