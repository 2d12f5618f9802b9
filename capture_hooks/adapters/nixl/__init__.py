"""NIXL at the wire level: what an agent registers, posts and learns, whatever engine drives it.

``install(recorder)`` wraps methods of ``nixl_agent``; ``uninstall()`` puts the very same functions back. The
engine need not be known: a :class:`~capture_hooks.events.Send` has the descriptors of both sides in bytes, from
plain lists and from prepared ones, and ``moved`` says with the map of a process which pages those are. An
engine's hook further up may tell which request is worked on (``Recorder.about``); what of it goes into the Send is
said at :func:`capture_hooks.adapters.posts.tell_post`.

A transfer that the library refuses, at the post or before it, is told with an error as its only state. A descriptor
list that cannot be prepared belongs to no transfer, and is not told. What the library raises for a transfer that was
posted is told as it is and never taken for its end; NIXL 1.5 answers "DONE" or "PROC" and raises everything else.

What is known of handles, prepared lists and messages is bounded (:mod:`capture_hooks.adapters.nixl.kept`): engines run
for weeks and release handles where no hook sees it. Where something that was forgotten comes back, the hook is told as
not complete.

Nothing is waited for and nothing is raised into the engine.
"""

from capture_hooks.adapters.nixl.adapter import COVERS, NixlAdapter, install
from capture_hooks.adapters.nixl.lists import descriptors, moved

__all__ = ["COVERS", "NixlAdapter", "descriptors", "install", "moved"]
