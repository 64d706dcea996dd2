"""The model of docs/architecture.md in plain NumPy float64: slow, literal, forward only.

It shares no code with the package and is the second opinion the package is compared with.
Suffixes name axes: B batch, T tokens, D width, K operators, V vocabulary; a TD array is one row of the batch.
"""

import math
from dataclasses import dataclass

import numpy as np

NORM_EPS = 1e-5
ROPE_BASE = 10000.0


@dataclass
class Options:
    layer_types: list[str]
    heads: int
    operators: tuple[str, ...] = ("spectral", "attention")
    routing: str = "threshold"
    thresholds: list | None = None
    keys: str = "all"
    light_ffn: bool = True
    spectral_form: str = "sublayer"
    norm: str = "layernorm"
    norm_position: str = "post"
    positions: str = "rope"
    meta_router: bool = False
    gate_pool: str = "batch"
    entropy_eps: float = 0.0
    entropy_dc_weight: float = 1.0
    basis: np.ndarray | None = None
    cuts: list | None = None
    router_scale: str = "one"
    temporal_window: int = 16
    temporal_everywhere: bool = False
    embedding_norm: bool = False


def dct_basis(width):
    """C[k, n] = s_k cos(pi (2n + 1) k / 2D), s_0 = sqrt(1/D), otherwise sqrt(2/D)."""
    basis = np.zeros((width, width))
    for k in range(width):
        scale = math.sqrt(1 / width) if k == 0 else math.sqrt(2 / width)
        for n in range(width):
            basis[k, n] = scale * math.cos(math.pi * (2 * n + 1) * k / (2 * width))
    return basis


def softmax(values):
    exponentials = np.exp(values - values.max())
    return exponentials / exponentials.sum()


def linear(x_D, weights, name):
    return weights[name + ".weight"] @ x_D + weights[name + ".bias"]


def normalise(x_D, weights, name, options):
    """LayerNorm: (x - mean) / sqrt(var + eps) * weight + bias; RMSNorm: x / sqrt(mean x^2 + eps) * weight."""
    if options.norm == "rmsnorm":
        # The filter's own norm may have no weight.
        return x_D / math.sqrt((x_D**2).mean() + NORM_EPS) * weights.get(name + ".weight", 1.0)
    centred_D = x_D - x_D.mean()
    scaled_D = centred_D / math.sqrt((centred_D**2).mean() + NORM_EPS)
    return scaled_D * weights[name + ".weight"] + weights[name + ".bias"]


def temporal_filter(x_TD, weights, name, real_T, options):
    """y_t = now x_t + sum_j tap_j x_(j real tokens before), tap_j = sum_k C[k, j] coefficient_k, C the DCT over W."""
    basis = dct_basis(options.temporal_window)
    coefficients_KD = weights[f"{name}.coefficients_KD"]
    taps_WD = [sum(basis[k, j] * c_D for k, c_D in enumerate(coefficients_KD)) for j in range(options.temporal_window)]
    y_TD = np.zeros(x_TD.shape)
    for t in range(len(x_TD)):
        before = [s for s in range(t + 1) if real_T[s]][::-1]
        y_TD[t] = weights[f"{name}.now_D"] * x_TD[t]
        for tap_D, s in zip(taps_WD, before, strict=False):
            y_TD[t] += tap_D * x_TD[s]
    return y_TD


def feed_forward(x_D, weights, layer):
    """Linear D->4D, exact GELU a (1 + erf(a / sqrt 2)) / 2, Linear 4D->D."""
    hidden = linear(x_D, weights, f"{layer}.ffn.up")
    activated = np.array([a * (1 + math.erf(a / math.sqrt(2))) / 2 for a in hidden])
    return linear(activated, weights, f"{layer}.ffn.down")


def spectral_entropy(x_D, basis, options):
    """p_i = e_i / sum_j e_j with e_i the squared coefficients; H = -sum p log p / log D."""
    eps = options.entropy_eps
    largest = np.abs(x_D).max()
    if eps == 0 and largest == 0:
        return 0.0
    energy_D = (basis @ (x_D / largest if eps == 0 else x_D)) ** 2
    energy_D[0] *= options.entropy_dc_weight
    p_D = energy_D / (energy_D.sum() + eps)
    total = sum(p * math.log(p + eps) for p in p_D if p > 0)
    entropy = -total / math.log(len(x_D))
    return entropy if eps > 0 else min(max(entropy, 0.0), 1.0)


def spectral_filter(x_D, weights, layer, basis):
    """x -> C^T diag(w) C x."""
    return basis.T @ (weights[f"{layer}.filter"] * (basis @ x_D))


def visible_keys(query, is_key_T):
    """The keys of one query: itself, and every earlier token that is a key."""
    return [token for token in range(query + 1) if token == query or is_key_T[token]]


def rotate(vector, position):
    """RoPE, rotate-half: the pair (i, i + d/2) turns by the angle position * base^(-2i/d)."""
    size = len(vector)
    half = size // 2
    rotated = np.zeros(size)
    for i in range(half):
        angle = position * ROPE_BASE ** (-2 * i / size)
        first, second = vector[i], vector[i + half]
        rotated[i] = first * math.cos(angle) - second * math.sin(angle)
        rotated[i + half] = second * math.cos(angle) + first * math.sin(angle)
    return rotated


def attention(x_TD, weights, layer, is_key_T, positions_T, options):
    """Per head softmax(q k / sqrt d) v over the visible keys, heads joined, output projection."""
    tokens, width = x_TD.shape
    size = width // options.heads
    qkv = [linear(x_D, weights, f"{layer}.attention.qkv") for x_D in x_TD]
    joined_TD = np.zeros((tokens, width))
    for head in range(options.heads):
        part = slice(head * size, (head + 1) * size)
        queries = [row[:width][part] for row in qkv]
        keys = [row[width : 2 * width][part] for row in qkv]
        values = [row[2 * width :][part] for row in qkv]
        if options.positions == "rope":
            queries = [rotate(queries[t], positions_T[t]) for t in range(tokens)]
            keys = [rotate(keys[t], positions_T[t]) for t in range(tokens)]
        for t in range(tokens):
            visible = visible_keys(t, is_key_T)
            probabilities = softmax(np.array([queries[t] @ keys[s] / math.sqrt(size) for s in visible]))
            joined_TD[t, part] = sum(p * values[s] for p, s in zip(probabilities, visible, strict=True))
    return np.array([linear(joined_D, weights, f"{layer}.attention.out") for joined_D in joined_TD])


def rbf_mixing(x_TD, weights, layer, is_key_T):
    """phi = [cos, sin](x omega / sqrt 64); A = causal softmax(phi phi^T); Linear(A phi)."""
    omega = weights[f"{layer}.rbf.omega"]
    output_TD = np.zeros(x_TD.shape)
    features = []
    for x_D in x_TD:
        projected = x_D @ omega / math.sqrt(omega.shape[1])
        features.append(np.concatenate([np.cos(projected), np.sin(projected)]))
    for t in range(len(x_TD)):
        visible = visible_keys(t, is_key_T)
        probabilities = softmax(np.array([features[t] @ features[s] for s in visible]))
        mixed = sum(p * features[s] for p, s in zip(probabilities, visible, strict=True))
        output_TD[t] = linear(mixed, weights, f"{layer}.rbf.out")
    return output_TD


def choose(x_D, entropy, forced, layer, weights, options):
    """One token of a routed layer: the operator index (forced replaces it) and the blend weights.

    threshold: H > tau -> 1 (three operators: H <= low -> 0, low < H <= high -> 1, else 2);
    hard, soft: argmax, softmax of a linear map of [x; H];
    where cuts follow the scores, they are used; with the scale "probability" attention's weight is 2p.
    """
    count = len(options.operators)
    if options.router_scale == "probability" or (options.cuts and options.routing == "hard"):
        return choose_by_lead(x_D, entropy, forced, layer, weights, options)
    if forced is not None and options.routing != "soft":
        return forced, np.eye(count)[forced]
    if options.routing == "threshold":
        threshold = (options.cuts or options.thresholds)[options.layer_types[:layer].count("routed")]
        bounds = [threshold] if count == 2 else threshold
        choice = sum(1 for bound in bounds if entropy > bound)
        return choice, np.eye(count)[choice]
    logits = router_logits(x_D, entropy, layer, weights, options)
    choice = int(np.argmax(logits))
    if options.routing == "soft":
        return choice if forced is None else forced, softmax(logits)
    return choice, np.eye(count)[choice]


def router_logits(x_D, entropy, layer, weights, options):
    if options.norm_position == "pre":
        x_D = normalise(x_D, weights, f"{layer}.attention_norm", options)
    return linear(np.append(x_D, entropy), weights, f"{layer}.router")


def choose_by_lead(x_D, entropy, forced, layer, weights, options):
    """Attention where the score exceeds its cut; p is the sigmoid of how far."""
    nth = options.layer_types[:layer].count("routed")
    light, dark = router_logits(x_D, entropy, layer, weights, options)
    lead = dark - light - (options.cuts[nth] if options.cuts else 0.0)
    choice = int(lead > 0) if forced is None else forced
    gates = np.eye(2)[choice]
    if options.router_scale == "probability":
        gates[1] *= 2 / (1 + math.exp(-lead))
    return choice, gates


def combine(x_D, operated, gates, operators, skip_light_ffn, layer, weights, options):
    """One token of the block: x, the output of every operator for it, and the blend weights w_k.

    post, sublayer: u = sum w_k LN_k(x + op_k(x)); y = LN_f(u + FFN(u)).
    post, equation: y = LN_f(r + FFN(z)), (r, z) blends (x, filter(x)) and (u_k, u_k).
    pre: u = x + sum w_k op_k(LN_k(x)); y = u + FFN(LN_f(u)).
    Without the light FFN the blend comes after the FFN, which operator 0 skips.
    """

    def block_norm(name, value_D):
        return normalise(value_D, weights, f"{layer}.{name}_norm", options)

    def ffn(value_D):
        return feed_forward(value_D, weights, layer)

    indices = range(len(operators))
    if options.norm_position == "pre":
        if skip_light_ffn:
            ends = [operated[k] + ffn(block_norm("ffn", x_D + operated[k])) for k in indices]
            return x_D + gates[0] * operated[0] + sum(gates[k] * ends[k] for k in indices[1:])
        u_D = x_D + sum(gates[k] * operated[k] for k in indices)
        return u_D + ffn(block_norm("ffn", u_D))
    if options.spectral_form == "equation":
        residuals, insides = [], []
        for k in indices:
            light = operators[k] == "spectral"
            residuals.append(x_D if light else block_norm(operators[k], x_D + operated[k]))
            insides.append(operated[k] if light else residuals[k])
        residual_D = sum(gates[k] * residuals[k] for k in indices)
        return block_norm("ffn", residual_D + ffn(sum(gates[k] * insides[k] for k in indices)))
    sublayers = [block_norm(operators[k], x_D + operated[k]) for k in indices]
    if skip_light_ffn:
        ends = [block_norm("ffn", u_D + ffn(u_D)) for u_D in sublayers]
        return gates[0] * sublayers[0] + sum(gates[k] * ends[k] for k in indices[1:])
    u_D = sum(gates[k] * sublayers[k] for k in indices)
    return block_norm("ffn", u_D + ffn(u_D))


def block(x_TD, gates_TK, choice_T, real_T, positions_T, layer, weights, basis, options):
    """One layer on one row."""
    kind = options.layer_types[layer]
    operators = options.operators if kind == "routed" else (kind,)
    operated_K = []
    for k, operator in enumerate(operators):
        name = f"{layer}.{operator}_norm"
        input_TD = x_TD
        if options.norm_position == "pre":
            input_TD = np.array([normalise(x_D, weights, name, options) for x_D in x_TD])
        is_key_T = real_T
        if kind == "routed" and options.keys == "routed" and options.routing != "soft":
            is_key_T = real_T & (choice_T == k)
        if operator == "spectral":
            operated_K.append([spectral_filter(x_D, weights, layer, basis) for x_D in input_TD])
        elif operator == "temporal":
            operated_K.append(temporal_filter(input_TD, weights, f"{layer}.temporal", real_T, options))
        elif operator == "rbf":
            operated_K.append(rbf_mixing(input_TD, weights, layer, is_key_T))
        else:
            operated_K.append(attention(input_TD, weights, layer, is_key_T, positions_T, options))
    skip_light_ffn = kind == "routed" and not options.light_ffn
    y_TD = np.zeros(x_TD.shape)
    for t in range(len(x_TD)):
        operated = [output_TD[t] for output_TD in operated_K]
        y_TD[t] = combine(x_TD[t], operated, gates_TK[t], operators, skip_light_ffn, layer, weights, options)
    return y_TD


def along_time(x_TD, weights, layer, real_T, options):
    """The filter before a layer's operators: x + filter(LN(x)), or LN(x + filter(x)) under post-norm."""
    name = f"{layer}.everywhere"

    def norm(value_TD):
        return np.array([normalise(x_D, weights, name + ".norm", options) for x_D in value_TD])

    if options.norm_position == "pre":
        return x_TD + temporal_filter(norm(x_TD), weights, name + ".filter", real_T, options)
    return norm(x_TD + temporal_filter(x_TD, weights, name + ".filter", real_T, options))


def gate(x_BTD, real_BT, weights, options):
    """g = sigmoid(w_g . x_bar + b); x_bar is the mean of the real tokens of the pool, 0 if it has none."""
    rows, tokens = real_BT.shape
    g_BT = np.zeros((rows, tokens))
    for b in range(rows):
        for t in range(tokens):
            if options.gate_pool == "batch":
                pool = x_BTD[real_BT]
            elif options.gate_pool == "sequence":
                pool = x_BTD[b][real_BT[b]]
            else:
                pool = x_BTD[b, : t + 1][real_BT[b, : t + 1]]
            mean_D = pool.sum(axis=0) / max(len(pool), 1)
            g_BT[b, t] = 1 / (1 + math.exp(-(weights["gate.weight"] @ mean_D + weights["gate.bias"])))
    return g_BT


def forward(
    weights: dict[str, np.ndarray],
    ids_BT: np.ndarray,
    options: Options,
    mask_BT: np.ndarray | None = None,
    forced: dict[int, np.ndarray] | None = None,
) -> dict:
    """Logits of every token, and H, choice, blend weights of every routed layer, and the gate."""
    weights = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    rows, tokens = ids_BT.shape
    width = weights["token_emb"].shape[1]
    basis = dct_basis(width) if options.basis is None else np.asarray(options.basis, dtype=np.float64)
    real_BT = np.ones((rows, tokens), dtype=bool) if mask_BT is None else np.asarray(mask_BT) != 0
    positions_BT = np.zeros((rows, tokens), dtype=int)
    x_BTD = np.zeros((rows, tokens, width))
    for b in range(rows):
        for t in range(tokens):
            positions_BT[b, t] = real_BT[b, :t].sum() if real_BT[b, t] else 0
            x_BTD[b, t] = weights["token_emb"][ids_BT[b, t]]
            if options.positions == "learned":
                x_BTD[b, t] += weights["position_emb"][positions_BT[b, t]]
            if options.embedding_norm:
                x_BTD[b, t] /= math.sqrt((x_BTD[b, t] ** 2).mean() + 1e-10)
    g_BT = gate(x_BTD, real_BT, weights, options) if options.meta_router else None
    entropies, choices, blends = {}, {}, {}
    for layer, kind in enumerate(options.layer_types):
        before_BTD = x_BTD
        if options.temporal_everywhere:
            x_BTD = np.array([along_time(x_BTD[b], weights, layer, real_BT[b], options) for b in range(rows)])
        routed = kind == "routed"
        entropy_BT = np.zeros((rows, tokens))
        choice_BT = np.zeros((rows, tokens), dtype=int)
        gates_BTK = np.ones((rows, tokens, len(options.operators) if routed else 1))
        if routed:
            for b in range(rows):
                for t in range(tokens):
                    override = int(forced[layer][b, t]) if forced and layer in forced else None
                    entropy_BT[b, t] = spectral_entropy(x_BTD[b, t], basis, options)
                    token = (x_BTD[b, t], entropy_BT[b, t], override)
                    choice_BT[b, t], gates_BTK[b, t] = choose(*token, layer, weights, options)
            entropies[layer], choices[layer], blends[layer] = entropy_BT, choice_BT, gates_BTK
        y_BTD = np.zeros(x_BTD.shape)
        for b in range(rows):
            row = (x_BTD[b], gates_BTK[b], choice_BT[b], real_BT[b], positions_BT[b])
            y_BTD[b] = block(*row, layer, weights, basis, options)
        if layer == 0 and g_BT is not None:
            y_BTD = g_BT[:, :, None] * y_BTD + (1 - g_BT[:, :, None]) * before_BTD
        x_BTD = y_BTD
    logits = np.zeros((rows, tokens, len(weights["token_emb"])))
    for b in range(rows):
        for t in range(tokens):
            logits[b, t] = weights["token_emb"] @ normalise(x_BTD[b, t], weights, "norm", options)
    return {"logits": logits, "H": entropies, "choice": choices, "gates": blends, "g": g_BT}
