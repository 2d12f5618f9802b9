"""Two faults at once: both are found, each at its place, and neither makes another kind of the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from capture_hooks.layouts import layout
from tests.property.test_verdict_healthy import folder, quick
from tests.scenarios.outcome import verdict_of
from tests.scenarios.pattern import rows
from tests.scenarios.scene import Scene
from tests.scenarios.side import Job

ON_THE_WAY = {"tear": "F09", "lose": "F31"}
LATER = {"clear": "F15", "pad": "F23", "draft": "F29"}

faults = st.fixed_dictionaries(
    {
        "first": st.sampled_from(sorted(ON_THE_WAY)),
        "second": st.sampled_from(sorted(LATER)),
        "pages": st.tuples(st.integers(0, 2), st.integers(0, 2)),
        "row": st.integers(0, 63),
        "cut": st.integers(1, 60),
        "format": st.sampled_from(["fp8", "bf16", "fp4"]),
        "scales": st.sampled_from(["standard", "powers"]),
        "keep": st.sampled_from(["bytes", "digests"]),
    }
)


def story(scene: Scene, fault: dict[str, Any]) -> Any:
    """A part of one page arrives late or never; after completion one page is hit at the reading side."""
    spec, job = layout(fault["format"]), Job(7000, 0, 192, [21, 22, 23], [5, 6, 7])
    scene.earlier([21, 22, 23], [5, 6, 7])
    scene.start(job)
    scene.announce(job)
    scene.store(job, 0, job.rows)
    torn, hit = (job.decode[k] for k in fault["pages"])
    transfer = scene.post(job)
    scene.land(transfer, only=(0, fault["cut"] * spec.value_bytes), pages=[torn])
    scene.done(transfer)
    scene.arrive(job)
    scene.read(job)
    if fault["first"] == "tear":
        scene.land(transfer)
    d = scene.decode
    slot = np.array([hit * 64 + fault["row"]])
    if fault["second"] == "clear":
        d.memory[0][hit] = 0
    else:
        values, words = rows(6, 0, [700], format=fault["format"], scales=fault["scales"])
        d.write_rows(0, slot, values, words)
        if fault["second"] == "pad":
            d.emit("store", room=-1, buffer=d.buffer(0), slots=slot, positions=[0], logical_rows=[-1])
        else:
            scene.tell_store(d, job, 0, slot, scene.step(), draft=True)
    scene.look("LT", job)
    scene.read(job)
    return verdict_of(scene)


@quick
@given(fault=faults)
def test_both_are_found_and_neither_makes_another_kind_of_the_other(fault: dict[str, Any]) -> None:
    with folder() as path:
        how = {name: fault[name] for name in ("format", "scales", "keep")}
        verdict = story(Scene(path, **how), fault)
        wanted = {ON_THE_WAY[fault["first"]], LATER[fault["second"]]}
        assert verdict.verdict == "divergent"
        told = {(f.code, page.logical) for f in verdict.findings for page in f.pages}
        assert {code for code, _ in told} <= wanted | {"unclassified"}
        assert {page for _, page in told} == set(fault["pages"])
        if fault["pages"][0] != fault["pages"][1]:
            first, second = fault["pages"]
            assert told == {(ON_THE_WAY[fault["first"]], first), (LATER[fault["second"]], second)}
        else:
            # The second fault hides what came late of the first: what is left is told at its stage.
            assert len(verdict.findings) > 1 or verdict.not_judged or len(told) == 1
