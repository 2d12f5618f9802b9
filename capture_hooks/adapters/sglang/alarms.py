"""SGLang's own alarms: each is a trigger, so the bytes of the seconds around it are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capture_hooks.adapters.sglang.patch import hook_name
from capture_hooks.adapters.sglang.requests import room_of
from capture_hooks.adapters.sglang.versions import Target, at, only

if TYPE_CHECKING:
    from capture_hooks.adapters.sglang.session import Session

HOOKS: tuple[Target, ...] = (
    Target(
        "SchedulerDisaggregationDecodeMixin._handle_kv_checksum_mismatch",
        "alarm",
        only(
            "0.5.23",
            "disaggregation.decode",
            "SchedulerDisaggregationDecodeMixin._handle_kv_checksum_mismatch",
        ),
        ("decode",),
        ("req",),
    ),
    Target(
        "ViolationReporter.log_or_raise_violation",
        "alarm",
        at("kv_canary.runner.violation_reporter", "ViolationReporter.log_or_raise_violation"),
    ),
)


def install(session: Session) -> None:
    """Hook the alarms."""
    recorder = session.recorder

    def mismatch(_: Any, req: Any, *__: Any, **___: Any) -> None:
        room = room_of(req)
        held = session.requests.of_room(room)
        recorder.trigger("SGLang's KV checksum differs", room, held.attempt if held is not None else 0)

    def report(original: Any, reporter: Any, *args: Any, **keywords: Any) -> Any:
        before = getattr(reporter, "_last_logged_write_index", 0)
        try:
            return original(reporter, *args, **keywords)  # raises, where the canary is told to
        finally:
            with recorder.guard(hook_name("ViolationReporter.log_or_raise_violation")):
                if getattr(reporter, "_last_logged_write_index", 0) != before:
                    recorder.trigger("SGLang's kv-canary found a violation")

    session.patches.wrap("SchedulerDisaggregationDecodeMixin._handle_kv_checksum_mismatch", before=mismatch)
    session.patches.wrap("ViolationReporter.log_or_raise_violation", around=report)
