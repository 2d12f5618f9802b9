"""Every kind that this version can name, as its classifier declares it."""

from __future__ import annotations

from replay.classify import (
    buffer_missing,
    completion_early,
    component_late,
    failed_transfer_used,
    freed_page_referenced,
    integer_wrap,
    kernel_numerics,
    late_foreign_write,
    layout_permuted,
    length_off_by_one,
    list_too_short,
    local_clear,
    lost_on_wire,
    metadata_mix_up,
    number_format,
    padding_row_written,
    partial_slice,
    sent_before_written,
    source_overwritten,
    speculative_row_misuse,
    stale_slot_mapping,
    token_index_as_page_index,
    top_k,
    torn_block_table,
    truncated_copy,
    wrong_item_length,
    wrong_layer_pairing,
    wrong_page_id_space,
    wrong_store_bytes,
    wrong_stride,
)
from replay.classify.base import MODES, VOCABULARY, Kind

_DECLARED = (
    buffer_missing.KIND,
    list_too_short.KIND,
    wrong_item_length.KIND,
    wrong_page_id_space.KIND,
    wrong_layer_pairing.KIND,
    partial_slice.KIND,
    truncated_copy.KIND,
    layout_permuted.KIND,
    completion_early.KIND,
    component_late.KIND,
    sent_before_written.KIND,
    source_overwritten.KIND,
    failed_transfer_used.KIND,
    late_foreign_write.KIND,
    local_clear.KIND,
    freed_page_referenced.KIND,
    padding_row_written.KIND,
    speculative_row_misuse.KIND,
    torn_block_table.KIND,
    stale_slot_mapping.KIND,
    length_off_by_one.KIND,
    metadata_mix_up.KIND,
    kernel_numerics.KIND,
    top_k.INVALID,
    top_k.WRONG,
    number_format.KIND,
    wrong_stride.KIND,
    integer_wrap.KIND,
    token_index_as_page_index.KIND,
    wrong_store_bytes.KIND,
    lost_on_wire.KIND,
)

#: Code -> declaration, in the order of the codes.
NAMED: dict[str, Kind] = {kind.code: kind for kind in sorted(_DECLARED, key=lambda kind: kind.code)}


def markdown() -> str:
    """The table kind x mode -> best claim, with what each claim asks for, as docs/verdicts.md has it."""
    lines = [
        "| code | evidence of the kind | `certain` also asks for | best claim: "
        + " | ".join(f"`{mode}`" for mode in MODES)
        + " |",
        "|---|---|---|" + "---|" * len(MODES),
    ]
    for code, (name, stages) in VOCABULARY.items():
        kind = NAMED.get(code)
        if kind is None:
            lines.append(
                f"| {code} `{name}` | not named by this version: `unclassified` at {', '.join(stages)} | "
                + " | ".join("" for _ in range(len(MODES) + 1))
                + " |"
            )
            continue
        best = " | ".join(kind.best[mode] or "not named" for mode in MODES)
        lines.append(f"| {code} `{name}` | {kind.shows} | {kind.certain} | {best} |")
    return "\n".join(lines) + "\n"
