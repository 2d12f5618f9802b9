"""The transfer library below SGLang: its own adapter, installed before SGLang's hooks so that they can listen to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capture_hooks.adapters.sglang import keys
from capture_hooks.adapters.sglang.patch import hook_name
from capture_hooks.adapters.sglang.versions import MOONCAKE, Target, at

if TYPE_CHECKING:
    from capture_hooks.adapters.mooncake import MooncakeAdapter
    from capture_hooks.adapters.sglang.session import Session

_PAIR = ("prefill", "decode")

HOOKS: tuple[Target, ...] = (
    Target(
        "MooncakeKVManager._transfer_data",
        "send",
        at(MOONCAKE, "MooncakeKVManager._transfer_data"),
        ("prefill",),
        ("mooncake_session_id", "transfer_blocks"),
    ),
    Target(
        "MooncakeKVManager.register_buffer_to_engine",
        "registration",
        at(MOONCAKE, "MooncakeKVManager.register_buffer_to_engine"),
        _PAIR,
    ),
)


def install(session: Session) -> None:
    """Install the adapter of the transfer library in use."""
    if session.role == "server":
        return
    if session.transport == "mooncake":
        _mooncake(session)
    elif session.transport in ("", "nixl"):
        from capture_hooks.adapters import nixl

        session.wire = nixl.install(session.recorder)


def _mooncake(session: Session) -> None:
    from capture_hooks.adapters.mooncake import MooncakeAdapter

    wire: MooncakeAdapter = MooncakeAdapter(session.recorder)
    session.wire = wire

    def moves(
        original: Any,
        manager: Any,
        mooncake_session_id: Any,
        transfer_blocks: Any,
        *args: Any,
        **keywords: Any,
    ) -> Any:
        def call() -> Any:
            return original(manager, mooncake_session_id, transfer_blocks, *args, **keywords)

        ends: tuple[str, str] | None = None
        with session.recorder.guard(hook_name("MooncakeKVManager._transfer_data")):
            if len(transfer_blocks):
                ends = keys.peer(keys.agent(manager)), keys.peer(mooncake_session_id)
        return call() if ends is None else wire.transfer(call, *ends, transfer_blocks)

    def registers(_: None, manager: Any, /) -> None:
        args = manager.kv_args
        wire.registered(
            keys.peer(keys.agent(manager)), zip(args.kv_data_ptrs, args.kv_data_lens, strict=False)
        )

    session.patches.wrap("MooncakeKVManager._transfer_data", around=moves)
    session.patches.wrap("MooncakeKVManager.register_buffer_to_engine", after=registers)
