"""``REPLAY.md`` of a bundle: what it holds, what it does not, and how to see the fault again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from analysis.markdown import fenced
from analysis.story import Story
from replay.words import counted

#: What the key bytes mean for whoever sends them.
WARNING = (
    "Key bytes are computed from the prompt. Tokens and prompts are not in this bundle, but whoever has these bytes "
    "and the model may be able to say what the prompt was about. Send it only to those who might see the prompt."
)
#: What never goes into a bundle.
NEVER = (
    "tokens, prompts and replies; client request ids, and hashes of them; host and user names; network and memory "
    "addresses (offsets instead); paths; names of agents, hooks and runs (letters instead); dates; free text of any "
    "record; environment variables other than the versions below"
)


def replay_md(story: Story, files: Mapping[str, str], left_out: Sequence[str], cases: int) -> str:
    """The text, as Markdown."""
    listed = "\n".join(f"- `{name}`: {about}" for name, about in files.items() if name != "REPLAY.md")
    gone = "\n".join(f"- {text}" for text in (*left_out, NEVER))
    shows = (
        f"`python repro.py` shows {counted(cases, 'difference')} from `pages.npz`; it needs numpy alone."
        if cases
        else "The verdict names no difference that `repro.py` could show."
    )
    processes = "\n".join(
        line
        for p in story.processes
        for line in (p.name, *(f"  {label:<10} {text}" for label, text in p.facts))
    )
    return f"""# A replayable fault of a KV cache

{fenced(story.block)}

## Replay it

With kv-replay installed (`pip install .` in a checkout), in an empty folder:

    unzip BUNDLE.zip
    replay trace.h5

The verdict is that of `verdict.json`. `replay report trace.h5 -o again.html` makes `report.html` again. {shows}

## What is here

{listed}

Recorded by:

{fenced(processes)}

## What is not here

{gone}

**{WARNING}**

Made by kv-replay {story.version}.
"""
