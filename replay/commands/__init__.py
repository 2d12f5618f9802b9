"""The commands, one small module each: its click command is called ``command``.

A module here imports only the standard library, click and ``replay.verdict`` at its top; everything else inside
the function, so that the help stays quick. A command returns its exit code (``None`` is 0).
"""
