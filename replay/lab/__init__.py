"""A prefill/decode pair in miniature on a real transport, with faults to switch on. See docs/lab.md."""
