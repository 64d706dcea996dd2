"""A routed text as a table for other programs: one line for each token in each layer."""

import csv
import io

from chiar.analysis.trace_view import RoutedText
from chiar.visible import visible

COLUMNS = (
    *("position", "token_id", "piece", "layer", "kind"),
    *("operator", "attention_weight", "entropy", "thresholds", "gate"),
)


def routing_csv(routed: RoutedText) -> str:
    """Layers count from 1, as in everything printed; what a layer does not have is left empty."""
    trace, out = routed.trace, io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    ids = [""] * len(routed.pieces) if trace.token_ids_BT is None else trace.token_ids_BT[0].tolist()
    for position, (token, piece) in enumerate(zip(ids, routed.pieces, strict=True)):
        for layer in trace.layers:
            attention = layer.operators.index("attention") if "attention" in layer.operators else None
            writer.writerow(
                [
                    position,
                    token,
                    visible(piece, keep=""),
                    layer.index + 1,
                    layer.kind,
                    layer.operators[int(layer.choice_BT[0, position])],
                    0.0 if attention is None else float(layer.weights_BTK[0, position, attention]),
                    "" if layer.entropy_BT is None else float(layer.entropy_BT[0, position]),
                    " ".join(map(str, layer.thresholds or [])),
                    "" if layer.gate_BT is None else float(layer.gate_BT[0, position]),
                ]
            )
    return out.getvalue()
