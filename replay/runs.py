"""Runs: the processes of a trace have to belong to one run of a pair.

Requests are known by room and attempt. Where two processes of one role and rank both served the same room, two runs
were recorded into one folder, or a server was started anew and its clients came again: nothing in the records says
which prefill belongs to which decode, and every page of such a room would be laid at somebody's door wrongly.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from replay.trace.errors import TraceError
from replay.trace.reader import Trace


def check_one_run(trace: Trace) -> None:
    """Refuse a trace in which rooms cannot be told apart.

    Raises:
        TraceError: two processes of the same role and rank both know a request (room and attempt).
    """
    places: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number, info in enumerate(trace.processes):
        places[info.role, info.rank].append(number)
    if all(len(numbers) == 1 for numbers in places.values()):
        return
    table = trace.table("request")
    process, room, attempt = table["process"], table["room"], table["attempt"]
    for (role, rank), numbers in places.items():
        known: dict[tuple[int, int], int] = {}
        for number in numbers if len(numbers) > 1 else ():
            mine = np.flatnonzero((process == number) & (room >= 0))
            for request in set(zip(room[mine].tolist(), attempt[mine].tolist(), strict=True)):
                other = known.setdefault(request, number)
                if other != number:
                    runs = ", ".join(trace.processes[which].run or "?" for which in (other, number))
                    raise TraceError(
                        f"two runs are mixed: {role} rank {rank} is there {len(numbers)} times, and room {request[0]} "
                        f"was served by more than one of them (runs {runs})",
                        ", ".join(dict.fromkeys(str(path.parent) for path in trace.paths)),
                        "Give the files of one run: replay PREFILL.h5 DECODE.h5",
                    )
