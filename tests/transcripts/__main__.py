"""Shell. `python -m tests.transcripts`: play every story and write the effects below its commands."""

from __future__ import annotations

from pathlib import Path

from tests.transcripts.player import play

for story in sorted(Path(__file__).parent.glob("*.txt")):
    before = story.read_text()
    story.write_text(after := play(before))
    print(f"{'changed' if after != before else 'as before'}: {story.name}")
