"""The trace format: writing, reading, merging and checking it. See ``SPEC.md`` in this folder."""
