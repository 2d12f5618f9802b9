"""Runs offline: reads traces, orders and replays what is in them, and judges it."""
