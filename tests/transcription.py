"""The model of docs/architecture.md in plain NumPy float64: slow, literal, forward only.

It shares no code with the package and is the second opinion the package is compared with.
Suffixes name axes: B batch, T tokens, D width, K operators, V vocabulary; a TD array is one row of the batch.
"""

import math
from types import SimpleNamespace as Options

import numpy as np

NORM_EPS = 1e-5
ROPE_BASE = 10000.0
erf = np.vectorize(math.erf)


def dct_basis(width):
    """C[k, n] = s_k cos(pi (2n + 1) k / 2D), s_0 = sqrt(1/D), otherwise sqrt(2/D)."""
    k, n = np.arange(width)[:, None], np.arange(width)
    basis = math.sqrt(2 / width) * np.cos(math.pi * (2 * n + 1) * k / (2 * width))
    basis[0] = math.sqrt(1 / width)
    return basis


def softmax(values):
    exponentials = np.exp(values - values.max())
    return exponentials / exponentials.sum()


def linear(x, weights, name):
    return x @ weights[name + ".weight"].T + weights[name + ".bias"]


def normalise(x, weights, name, options):
    """LayerNorm: (x - mean) / sqrt(var + eps) * weight + bias; RMSNorm: x / sqrt(mean x^2 + eps) * weight."""
    if options.norm == "rmsnorm":
        # The filter's own norm may have no weight.
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + NORM_EPS) * weights.get(name + ".weight", 1.0)
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + NORM_EPS)
    return scaled * weights[name + ".weight"] + weights[name + ".bias"]


def feed_forward(x, weights, layer):
    """Linear D->4D, exact GELU a (1 + erf(a / sqrt 2)) / 2, Linear 4D->D."""
    hidden = linear(x, weights, f"{layer}.ffn.up")
    return linear(hidden * (1 + erf(hidden / math.sqrt(2))) / 2, weights, f"{layer}.ffn.down")


def spectral_entropy(x_D, options):
    """p_i = e_i / sum_j e_j with e_i the squared coefficients; H = -sum p log p / log D."""
    eps = options.entropy_eps
    largest = np.abs(x_D).max()
    if eps == 0 and largest == 0:
        return 0.0
    energy_D = (options.basis @ (x_D / largest if eps == 0 else x_D)) ** 2
    energy_D[0] *= options.entropy_dc_weight
    p_D = energy_D / (energy_D.sum() + eps)
    entropy = -sum(p * math.log(p + eps) for p in p_D if p > 0) / math.log(len(x_D))
    return entropy if eps > 0 else min(max(entropy, 0.0), 1.0)


def spectral_filter(x_TD, weights, layer, basis):
    """x -> C^T diag(w) C x."""
    return (x_TD @ basis.T * weights[f"{layer}.filter"]) @ basis


def temporal_filter(x_TD, weights, name, real_T, options):
    """y_t = now x_t + sum_j tap_j x_(j real tokens before), tap_j = sum_k C[k, j] coefficient_k, C the DCT over W."""
    coefficients_KD = weights[f"{name}.coefficients_KD"]
    taps_WD = dct_basis(options.temporal_window)[: len(coefficients_KD)].T @ coefficients_KD
    y_TD = weights[f"{name}.now_D"] * x_TD
    for t in range(len(x_TD)):
        before = [s for s in range(t + 1) if real_T[s]][::-1]
        for tap_D, s in zip(taps_WD, before, strict=False):
            y_TD[t] += tap_D * x_TD[s]
    return y_TD


def causal_mix(scores_TT, values_TD, is_key_T):
    """Each token's softmax over the keys it sees, itself and every earlier token that is a key, of their values."""
    mixed_TD = np.zeros(values_TD.shape)
    for t in range(len(values_TD)):
        visible = [s for s in range(t + 1) if s == t or is_key_T[s]]
        mixed_TD[t] = softmax(scores_TT[t, visible]) @ values_TD[visible]
    return mixed_TD


def rotate(x_Td, positions_T):
    """RoPE, rotate-half: the pair (i, i + d/2) turns by the angle position * base^(-2i/d)."""
    half = x_Td.shape[1] // 2
    angle = positions_T[:, None] * ROPE_BASE ** (-np.arange(half) / half)
    first, second = x_Td[:, :half], x_Td[:, half:]
    return np.hstack([first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)])


def attention(x_TD, weights, layer, is_key_T, positions_T, options):
    """Per head softmax(q k / sqrt d) v over the visible keys, heads joined, output projection."""
    qkv = np.split(linear(x_TD, weights, f"{layer}.attention.qkv"), 3, axis=1)
    joined = []
    for q_Td, k_Td, v_Td in zip(*(np.split(part, options.num_attention_heads, axis=1) for part in qkv), strict=True):
        if options.positions == "rope":
            q_Td, k_Td = rotate(q_Td, positions_T), rotate(k_Td, positions_T)
        joined.append(causal_mix(q_Td @ k_Td.T / math.sqrt(q_Td.shape[1]), v_Td, is_key_T))
    return linear(np.hstack(joined), weights, f"{layer}.attention.out")


def rbf_mixing(x_TD, weights, layer, is_key_T):
    """phi = [cos, sin](x omega / sqrt 64); A = causal softmax(phi phi^T); Linear(A phi)."""
    omega = weights[f"{layer}.rbf.omega"]
    projected = x_TD @ omega / math.sqrt(omega.shape[1])
    features = np.hstack([np.cos(projected), np.sin(projected)])
    return linear(causal_mix(features @ features.T, features, is_key_T), weights, f"{layer}.rbf.out")


def choose(x_D, entropy, forced, layer, weights, options):
    """One token of a routed layer: the operator index (forced replaces it) and the blend weights.

    threshold: H > tau -> 1 (three operators: H <= low -> 0, low < H <= high -> 1, else 2);
    hard, soft: argmax, softmax of a linear map of [x; H];
    where cuts follow the scores, H or the lead of attention must exceed them instead;
    with the scale "probability" attention's weight is 2p.
    """
    nth, one_hot = options.layer_types[:layer].count("routed"), np.eye(len(options.operators))
    if options.routing == "threshold":
        bounds = np.atleast_1d((options.cuts or options.thresholds)[nth])
        choice = int((entropy > bounds).sum()) if forced is None else forced
        return choice, one_hot[choice]
    if options.norm_position == "pre":
        x_D = normalise(x_D, weights, f"{layer}.attention_norm", options)
    logits = linear(np.append(x_D, entropy), weights, f"{layer}.router")
    if options.cuts:
        logits[1] -= options.cuts[nth]
    choice = int(np.argmax(logits)) if forced is None else forced
    if options.routing == "soft":
        return choice, softmax(logits)
    gates = one_hot[choice]
    if options.router_scale == "probability":
        gates[1] *= 2 * softmax(logits)[1]
    return choice, gates


def combine(x_TD, operated, gates_TK, operators, skip_light_ffn, layer, weights, options):
    """From x, the output of every operator, and the blend weights w_k.

    post, sublayer: u = sum w_k LN_k(x + op_k(x)); y = LN_f(u + FFN(u)).
    post, equation: y = LN_f(r + FFN(z)), (r, z) blends (x, filter(x)) and (u_k, u_k).
    pre: u = x + sum w_k op_k(LN_k(x)); y = u + FFN(LN_f(u)).
    Without the light FFN the blend comes after the FFN, which operator 0 skips.
    """

    def norm(name, value):
        return normalise(value, weights, f"{layer}.{name}_norm", options)

    def ffn(value):
        return feed_forward(value, weights, layer)

    def blend(parts):
        return sum(gates_TK[:, k, None] * part for k, part in enumerate(parts))

    if options.norm_position == "pre":
        if skip_light_ffn:
            return x_TD + blend([operated[0], *(change + ffn(norm("ffn", x_TD + change)) for change in operated[1:])])
        u_TD = x_TD + blend(operated)
        return u_TD + ffn(norm("ffn", u_TD))
    equation = options.spectral_form == "equation"
    light = [equation and name == "spectral" for name in operators]
    residuals = [x_TD if light[k] else norm(name, x_TD + operated[k]) for k, name in enumerate(operators)]
    insides = [operated[k] if light[k] else residuals[k] for k in range(len(operators))]
    if skip_light_ffn:
        return blend([residuals[0], *(norm("ffn", u_TD + ffn(u_TD)) for u_TD in residuals[1:])])
    return norm("ffn", blend(residuals) + ffn(blend(insides)))


def block(x_TD, gates_TK, choice_T, real_T, positions_T, layer, weights, options):
    """One layer on one row."""
    kind = options.layer_types[layer]
    operators = options.operators if kind == "routed" else (kind,)
    operated = []
    for k, operator in enumerate(operators):
        pre = options.norm_position == "pre"
        seen_TD = normalise(x_TD, weights, f"{layer}.{operator}_norm", options) if pre else x_TD
        is_key_T = real_T
        if kind == "routed" and options.keys == "routed" and options.routing != "soft":
            is_key_T = real_T & (choice_T == k)
        if operator == "spectral":
            operated.append(spectral_filter(seen_TD, weights, layer, options.basis))
        elif operator == "temporal":
            operated.append(temporal_filter(seen_TD, weights, f"{layer}.temporal", real_T, options))
        elif operator == "rbf":
            operated.append(rbf_mixing(seen_TD, weights, layer, is_key_T))
        else:
            operated.append(attention(seen_TD, weights, layer, is_key_T, positions_T, options))
    skip_light_ffn = kind == "routed" and not options.light_ffn
    return combine(x_TD, operated, gates_TK, operators, skip_light_ffn, layer, weights, options)


def along_time(x_TD, weights, layer, real_T, options):
    """The filter before a layer's operators: x + filter(LN(x)), or LN(x + filter(x)) under post-norm."""
    norm, filter = f"{layer}.everywhere.norm", f"{layer}.everywhere.filter"
    if options.norm_position == "pre":
        return x_TD + temporal_filter(normalise(x_TD, weights, norm, options), weights, filter, real_T, options)
    return normalise(x_TD + temporal_filter(x_TD, weights, filter, real_T, options), weights, norm, options)


def gate(x_BTD, real_BT, weights, options):
    """g = sigmoid(w_g . x_bar + b); x_bar is the mean of the real tokens of the pool, 0 if it has none."""
    g_BT = np.zeros(real_BT.shape)
    for b, t in np.ndindex(real_BT.shape):
        if options.gate_pool == "batch":
            pool = x_BTD[real_BT]
        else:
            end = t + 1 if options.gate_pool == "causal" else None
            pool = x_BTD[b, :end][real_BT[b, :end]]
        mean_D = pool.sum(axis=0) / max(len(pool), 1)
        g_BT[b, t] = 1 / (1 + math.exp(-(weights["gate.weight"] @ mean_D + weights["gate.bias"])))
    return g_BT


def forward(weights: dict[str, np.ndarray], ids_BT: np.ndarray, real_BT: np.ndarray, forced: dict, options: Options):
    """Logits of every token, and H, choice, blend weights of every routed layer, and the gate.

    Options are the fields of a configuration, with the numbers the model holds for `thresholds`, `cuts` and `basis`.
    """
    weights = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    positions_BT = np.where(real_BT, real_BT.cumsum(1) - 1, 0)
    x_BTD = weights["token_emb"][ids_BT]
    if options.positions == "learned":
        x_BTD = x_BTD + weights["position_emb"][positions_BT]
    if options.embedding_norm:
        x_BTD = x_BTD / np.sqrt((x_BTD**2).mean(-1, keepdims=True) + 1e-10)
    g_BT = gate(x_BTD, real_BT, weights, options) if options.meta_router else None
    entropies, choices, blends = {}, {}, {}
    for layer, kind in enumerate(options.layer_types):
        before_BTD = x_BTD
        if options.temporal_everywhere:
            rows = zip(x_BTD, real_BT, strict=True)
            x_BTD = np.array([along_time(x_TD, weights, layer, real_T, options) for x_TD, real_T in rows])
        choice_BT = np.zeros(ids_BT.shape, dtype=int)
        gates_BTK = np.ones((*ids_BT.shape, len(options.operators) if kind == "routed" else 1))
        if kind == "routed":
            entropy_BT = np.zeros(ids_BT.shape)
            for b, t in np.ndindex(ids_BT.shape):
                override = int(forced[layer][b, t]) if layer in forced else None
                entropy_BT[b, t] = spectral_entropy(x_BTD[b, t], options)
                token = (x_BTD[b, t], entropy_BT[b, t], override)
                choice_BT[b, t], gates_BTK[b, t] = choose(*token, layer, weights, options)
            entropies[layer], choices[layer], blends[layer] = entropy_BT, choice_BT, gates_BTK
        rows = zip(x_BTD, gates_BTK, choice_BT, real_BT, positions_BT, strict=True)
        x_BTD = np.array([block(*row, layer, weights, options) for row in rows])
        if layer == 0 and g_BT is not None:
            x_BTD = g_BT[:, :, None] * x_BTD + (1 - g_BT[:, :, None]) * before_BTD
    logits = normalise(x_BTD, weights, "norm", options) @ weights["token_emb"].T
    return {"logits": logits, "H": entropies, "choice": choices, "gates": blends, "g": g_BT}
