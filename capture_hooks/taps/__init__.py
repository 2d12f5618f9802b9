"""Taps: what copies and digests pages, on the host or in stream order on a device."""
