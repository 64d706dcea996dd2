"use strict";
// Colours, labels and DOM nodes for the whole page. Text is only ever inserted as text.
const ChiarMarks = (() => {
  // Each from the colour at the threshold to that far from it. All light cells are paler than any dark one.
  const RAMPS = {
    light: [[255, 247, 205], [250, 205, 50]], temporal: [[218, 243, 236], [90, 205, 180]],
    rbf: [[221, 160, 195], [204, 121, 167]], attention: [[120, 170, 215], [8, 40, 100]],
  };
  const NAMES = {
    spectral: "light: spectral filter", temporal: "light: temporal filter", rbf: "between: RBF mixing", attention: "dark: attention",
    carry: "light: last change of the stack",
  };
  const ramp = (operator) => RAMPS[operator] || RAMPS.light;
  const nameOf = (operator) => NAMES[operator] || `light: ${operator}`;
  // From light to dark; a user's own operators are light.
  const inOrder = (operators) => [...new Set(operators)].sort((a, b) => rank(a) - rank(b));
  const rank = (operator) => ["rbf", "attention"].indexOf(operator);
  const LIGHT = RAMPS.light[1], DARK = RAMPS.attention[1];
  const LESS = [1, 133, 113], EVEN = [245, 245, 245], MORE = [166, 97, 26];  // loss than another model
  const SVG = "http://www.w3.org/2000/svg";

  const mix = (a, b, share) => a.map((v, i) => Math.round(v + (b[i] - v) * Math.min(Math.max(share, 0), 1)));
  const css = (rgb) => `rgb(${rgb.join(",")})`;
  const bright = ([r, g, b]) => 0.299 * r + 0.587 * g + 0.114 * b > 118;  // whether black on it reads better than white
  const shown = (piece) => piece.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  const edged = (piece) => shown(piece).replaceAll(" ", "·") || "∅";
  const percent = (value) => `${(100 * value).toFixed(0)}%`;
  const mean = (values) => values.reduce((sum, v) => sum + v, 0) / values.length;

  function make(name, options = {}, children = []) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(options)) {
      if (key === "text") node.textContent = value;
      else if (key === "class") node.className = value;
      else node.setAttribute(key, value);
    }
    node.append(...children);
    return node;
  }

  function draw(name, attributes, text) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function compact(number) {
    for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (number >= size) return `${(number / size).toPrecision(3)}${unit}`;
    }
    return number.toPrecision(3);
  }

  // A layer that routes its tokens, or a dark stack, which is one layer here.
  const chooses = (layer) => layer.kind === "routed" || layer.kind === "dark";
  const routed = (view) => view.layers.filter(chooses);
  const stackOf = (view) => view.layers.find((layer) => layer.kind === "dark");

  // How uncertain each token was before a dark stack, from 0 to 1, with τ at ½; null if that is unknown.
  function uncertainty(view) {
    const { entropy, thresholds } = stackOf(view) ?? {};
    if (!entropy) return null;
    const low = Math.min(...entropy), high = Math.max(...entropy), cut = thresholds?.[0];
    return entropy.map((score) => cut === undefined ? (score - low) / Math.max(high - low, 1e-9)
      : 0.5 + (score - cut) / Math.max(score <= cut ? cut - low : high - cut, 1e-9) / 2);
  }

  // Down from the light ramp's end to palest at ½, then the dark ramp.
  const entropyColour = (share) =>
    share <= 0.5 ? mix(...RAMPS.light, 1 - 2 * share) : mix(...RAMPS.attention, 2 * share - 1);
  const share = (view) => routed(view).length ? mean(routed(view).map((layer) => layer.use.attention)) : null;

  // Score minus τ, or minus the nearest of several thresholds.
  function gap(layer, t) {
    if (!layer.thresholds || !layer.entropy) return null;
    const gaps = layer.thresholds.map((threshold) => layer.entropy[t] - threshold);
    return gaps.reduce((best, value) => Math.abs(value) < Math.abs(best) ? value : best);
  }

  function farthest(view) {
    let most = 0;
    for (const layer of routed(view)) {
      for (let t = 0; t < layer.choice.length; t++) most = Math.max(most, Math.abs(gap(layer, t) ?? 0));
    }
    return most || 1;
  }

  // How clear a choice was, 0 to 1.
  function strength(layer, t, most) {
    const distance = gap(layer, t);
    if (distance !== null) return Math.abs(distance) / most;
    return layer.probability && layer.operators.length === 2 ? Math.abs(2 * layer.probability[t] - 1) : 0.5;
  }

  function facts(view, layer, t) {
    const token = view.tokens[t], operator = layer.operators[layer.choice[t]], lines = [];
    lines.push(`Layer ${layer.number}${chooses(layer) ? "" : " (not routed)"}: ${operator}`);
    if (layer.entropy) lines.push(`${layer.entropy_name} ${layer.entropy[t].toFixed(4)}`);
    if (layer.thresholds) {
      const cuts = layer.thresholds.map((value) => value.toFixed(4)).join(", ");
      lines.push(`threshold ${cuts} (${signed(gap(layer, t), 4)} from it)`);
    }
    if (layer.probability) lines.push(`p(attention) ${layer.probability[t].toFixed(3)}`);
    if (layer.gate) lines.push(`gate ${layer.gate[t].toFixed(3)}`);
    if (token.nats !== null) lines.push(`loss ${token.nats.toFixed(2)} nats`);
    return lines;
  }

  function signed(value, digits) {
    const size = Math.abs(value).toFixed(digits);
    return Number(size) === 0 ? size : `${value < 0 ? "−" : "+"}${size}`;
  }

  function tokenFacts(view, t) {
    const token = view.tokens[t], lines = [];
    for (const layer of routed(view)) {
      const score = layer.entropy ? `, ${layer.entropy_name} ${layer.entropy[t].toFixed(3)}` : "";
      lines.push(`Layer ${layer.number}: ${layer.operators[layer.choice[t]]}${score}`);
    }
    if (!lines.length) lines.push("attention in every layer");
    if (token.nats !== null) lines.push(`loss ${token.nats.toFixed(2)} nats`);
    return lines;
  }

  return {
    DARK, EVEN, LESS, LIGHT, MORE, bright, chooses, compact, css, draw, edged, entropyColour, facts, farthest, inOrder, make, mean, mix,
    nameOf, percent, ramp, routed, share, shown, signed, stackOf, strength, tokenFacts, uncertainty,
  };
})();
