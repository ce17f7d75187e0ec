"""Shell. The effects of each transcript in this folder equal those written in it.

After an intended change, `make transcripts` rewrites them; review the diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.transcripts.player import play
from tests.transcripts.story import WrongTranscript

FOLDER = Path(__file__).parent
STORIES = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.stem)
def test_transcript_is_unchanged(story):
    text = story.read_text()
    assert play(text) == text, f"make transcripts rewrites {story.name}; read the diff"


def test_unknown_command_is_refused():
    with pytest.raises(WrongTranscript, match="no command 'prodcue'"):
        play("group\n----\n\nprodcue s m1\n----\n")


def test_changed_effects_are_detected():
    text = (FOLDER / "produce_is_acknowledged_by_two_disks.txt").read_text()
    assert play(text.replace("stored 0..2", "stored 0..1")) == text
