"use strict";
// One routed text on screen, for the live page and for the report.
const ChiarView = (() => {
  const {
    DARK, EVEN, LESS, LIGHT, MORE, bright, chooses, compact, css, draw, edged, entropyColour, facts, farthest, inOrder, make, mean, mix,
    nameOf, percent, ramp, routed, share, shown, signed, stackOf, strength, tokenFacts, uncertainty,
  } = ChiarMarks;
  const LABEL = 96, CHARACTER = 7.3, NARROWEST = 17, LONGEST = 22;
  const WIDE_GAP = 2;  // difference of two models' losses, in nats, that gets the full colour

  // One tooltip for the whole page; pointer and keyboard show the same.
  const tip = {
    node: null,
    show(target, title, lines) {
      this.node ??= document.body.appendChild(make("div", { class: "tip", "aria-hidden": "true" }));
      this.node.replaceChildren(make("b", { text: title }), ...lines.map((line) => make("div", { text: line })));
      this.node.hidden = false;
      this.target = target;
      this.place();
    },
    place() {
      if (!this.node || this.node.hidden) return;
      const { target } = this;
      const box = target.getClientRects()[0] ?? target.getBoundingClientRect(), own = this.node.getBoundingClientRect();
      const left = Math.min(Math.max(8, box.left + box.width / 2 - own.width / 2), innerWidth - own.width - 8);
      const above = box.top - own.height - 8;
      this.node.style.left = `${left}px`;
      this.node.style.top = `${above > 4 ? above : box.bottom + 8}px`;
    },
    hide() { if (this.node) this.node.hidden = true; },
  };
  addEventListener("scroll", () => tip.place(), { passive: true, capture: true });

  // One tab stop; arrow keys move inside. `move(node, down, across)` returns the node to go to.
  function roving(root, selector, move) {
    root.addEventListener("keydown", (event) => {
      const here = event.target.closest(selector);
      if (event.key === "Escape") tip.hide();
      const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
      if (!here || !step) return;
      const next = move(here, ...step);
      if (!next) return;
      event.preventDefault();
      here.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
  }

  class Panel {
    constructor(root) {
      this.root = root;
      this.view = null;
      this.base = null;
      this.written = null;
      this.rival = null;
      this.colouring = "entropy";  // where that is known, else by route
      this.figures = make("dl", { class: "figures" });
      this.slot = make("div");
      const named = (name, role, what) => make("div", { class: name, role, "aria-label": `${what}; arrow keys move` });
      this.words = named("words", "group", "Tokens, light to dark by route");
      this.legend = make("p", { class: "legend" });
      this.grid = named("grid", "grid", "Layers down, tokens across");
      this.cellLegend = make("p", { class: "legend" });
      this.table = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Split of each layer" });
      this.histograms = make("div", { class: "histograms" });
      const title = (text) => make("h3", { text });
      this.histogramTitle = title("");
      this.beyond = make("p", { class: "note" });
      // What grows with the text comes last; the tokens have a scrolling box of their own.
      this.rest = make("div", {}, [title("Tokens"), this.words, this.legend, title("Split by layer"), this.table,
        this.histogramTitle, this.histograms, title("Routes, layer by token"), this.grid, this.cellLegend]);
      root.append(this.figures, this.beyond, this.slot, this.rest);
      this.clear();
      this.listen();
      new ResizeObserver(() => this.layOut()).observe(this.grid);
    }

    listen() {
      const describe = (node) => {
        if (node.matches(".cell")) return facts(this.view, this.view.layers[node.dataset.layer], node.dataset.token);
        const lines = tokenFacts(this.view, node.dataset.token), gap = this.gaps()[node.dataset.token];
        return gap === null ? lines : [...lines, this.against(gap)];
      };
      for (const region of [this.words, this.grid]) {
        const enter = (event) => {
          const node = event.target.closest(".token, .cell");
          if (node) tip.show(node, edged(this.view.tokens[node.dataset.token].piece), describe(node));
        };
        region.addEventListener("pointerover", enter);
        region.addEventListener("focusin", enter);
        region.addEventListener("pointerleave", () => tip.hide());
        region.addEventListener("focusout", () => tip.hide());
      }
      roving(this.words, ".token", (here, down, across) =>
        this.words.querySelector(`[data-token="${Number(here.dataset.token) + (across || down * 10)}"]`));
      roving(this.grid, ".cell", (here, down, across) => {
        const token = Number(here.dataset.token) + across, layer = Number(here.dataset.layer) + down;
        return this.grid.querySelector(`.cell[data-token="${token}"][data-layer="${layer}"]`);
      });
    }

    // `base` is the view with the model's own routes, for differences. The model wrote the tokens from `written` on.
    update(view, { base = null, written = null } = {}) {
      Object.assign(this, { view, base, written });
      this.rest.hidden = false;
      this.drawFigures();
      this.drawWords();
      this.width = null;
      this.layOut();
      this.drawTable();
      this.drawHistograms();
      this.rival?.recolour();
    }

    // Nothing is shown of a text that is not there.
    clear() {
      tip.hide();
      this.view = null;
      for (const part of [this.figures, this.words, this.table, this.histograms, this.grid]) part.replaceChildren();
      this.beyond.hidden = this.rest.hidden = true;
      this.rival?.recolour();
    }

    recolour() {
      if (this.view && this.colouring === "loss") this.drawWords();
    }

    // Each token's loss minus the rival's; null from the first differing token on, and where one has no loss.
    gaps() {
      const theirs = this.rival?.view?.tokens ?? [];
      let alike = true;
      return this.view.tokens.map(({ piece, nats }, t) => {
        alike &&= theirs[t]?.piece === piece;
        return alike && nats !== null && theirs[t].nats !== null ? nats - theirs[t].nats : null;
      });
    }

    against(gap) {
      return `${Math.abs(gap).toFixed(2)} nats ${gap > 0 ? "more" : "less"} than ${this.rival.view.model.name}`;
    }

    drawFigures() {
      const { view, base } = this, rows = [];
      const add = (name, value, detail, change) => {
        const below = [...(change ? [make("em", { text: change })] : []), make("small", { text: detail })];
        rows.push(make("div", {}, [make("dt", { text: name }), make("dd", { text: value }, below)]));
      };
      const difference = (now, before, digits, unit = "") => {
        if (!base || now === null || before === null || Math.abs(now - before) < 0.5 * 10 ** -digits) return "";
        return `${signed(now - before, digits)}${unit}`;
      };
      const dark = share(view);
      if (dark !== null) {
        const change = difference(100 * dark, base && 100 * share(base), 0, " pt");
        const stacks = view.layers.filter((layer) => layer.kind === "dark").map((layer) => layer.number).join(" and ");
        const where = stacks ? `of tokens pass layers ${stacks}` : "of tokens, over the routed layers";
        add("Sent to attention", percent(dark), where, change);
      }
      add("Loss", view.loss === null ? "–" : view.loss.toFixed(3), view.loss === null ? "needs two tokens" :
        `nats per token; perplexity ${compact(view.perplexity)}`, difference(view.loss, base && base.loss, 3));
      const saved = view.flops.saved, part = (one) => one && one.flops.model / one.flops.baseline * 100;
      const side = saved > 0 ? "below" : "above", size = Math.abs(100 * saved).toFixed(1);
      const gap = Math.abs(saved) < 0.0005 ? "" : `${size}% ${side} `;
      const change = difference(part(view), part(base), 1, " pt");
      add("Counted FLOPs", compact(view.flops.model), `per token; ${gap}attention everywhere`, change);
      this.figures.replaceChildren(...rows);
      const { trained } = view.model;
      this.beyond.hidden = trained === null || view.tokens.length <= trained;
      this.beyond.textContent = `Trained on texts of ${trained?.toLocaleString("en")} tokens: predictions beyond that are unreliable.`;
    }

    drawWords() {
      const { view, written } = this, byLoss = this.colouring === "loss", gaps = byLoss ? this.gaps() : null, nodes = [];
      const shares = this.colouring === "entropy" ? uncertainty(view) : null, stack = stackOf(view);
      const hueOf = (token, t) => shares ? entropyColour(shares[t]) : mix(LIGHT, DARK, token.dark);
      const paint = (node, colour) => {
        node.style.backgroundColor = css(colour);
        node.style.color = bright(colour) ? "#1b1b1b" : "#ffffff";
      };
      const hue = (gap) => mix(EVEN, gap < 0 ? LESS : MORE, Math.abs(gap) / WIDE_GAP);
      view.tokens.forEach((token, t) => {
        if (t === written) nodes.push(make("span", { class: "begin", text: "▸" }));
        const gap = gaps?.[t] ?? null, label = gap === null ? `${percent(token.dark)} dark` : this.against(gap);
        const node = make("span", { class: "token", dir: "auto", role: "img", "data-token": t, tabindex: t ? -1 : 0,
          "aria-label": `${edged(token.piece)}: ${label}` }, [shown(token.piece) || "∅"]);
        if (gap !== null) paint(node, hue(gap));
        else if (!byLoss) {
          paint(node, hueOf(token, t));
          node.style.borderBottomWidth = `${Math.round(3 * token.dark)}px`;
        }
        if (written !== null && t >= written) node.classList.add("written");
        nodes.push(node);
        if (token.piece.includes("\n")) nodes.push(document.createElement("br"));
      });
      this.words.replaceChildren(...nodes);
      const ramp = make("span", { class: "ramp" }, [0, 0.25, 0.5, 0.75, 1].map((part) => {
        const step = make("i");
        const own = shares ? entropyColour(part) : mix(LIGHT, DARK, part);
        step.style.backgroundColor = css(byLoss ? hue(WIDE_GAP * (2 * part - 1)) : own);
        return step;
      }));
      const ends = byLoss ? [`${WIDE_GAP} nats less`, `${WIDE_GAP} more`] : shares ? ["low", "high"] : ["light", "dark"];
      const other = byLoss && (this.rival.view?.model.name ?? "the other model");
      const meaning = byLoss ? `Loss against ${other}; no colour: nothing to compare.`
        : shares ? `By ${stack.entropy_name}${stack.thresholds ? ", τ half-way" : ""}; underlined: dark, through layers ${stack.number}.`
        : stack ? `Dark, and underlined: through layers ${stack.number}.`
        : routed(view).length ? "Darker, and underlined: more of the routed layers chose attention."
        : "No layer routes: every token takes attention in every layer.";
      const parts = [make("span", { class: "scale" }, [ends[0], ramp, ends[1]]), make("span", { text: meaning })];
      if (written !== null) parts.push(make("span", { text: "▸ Here the model begins; dotted: its own tokens." }));
      this.legend.replaceChildren(...parts);
    }

    // Tokens wrap like text, each as wide as its piece, with a cell for every layer below it.
    layOut() {
      const width = this.grid.clientWidth;
      if (!this.view || !width || width === this.width) return;
      this.width = width;
      const { view } = this, most = farthest(view), strips = [];
      const pieces = view.tokens.map((token) => {
        const piece = edged(token.piece);
        return [...piece].length > LONGEST ? `${[...piece].slice(0, LONGEST - 1).join("")}…` : piece;
      });
      const room = (piece) => Math.max(NARROWEST, Math.ceil([...piece].length * CHARACTER) + 6);
      let line = [], used = LABEL;
      const flush = () => {
        if (line.length) strips.push(this.strip(line, pieces, room, most));
        line = [];
        used = LABEL;
      };
      pieces.forEach((piece, t) => {
        if (used + room(piece) + 1 > width) flush();
        line.push(t);
        used += room(piece) + 1;
      });
      flush();
      this.grid.replaceChildren(...strips);
      this.grid.setAttribute("aria-colcount", String(pieces.length));
      this.grid.setAttribute("aria-rowcount", String(view.layers.length));
      const row = Math.max(0, view.layers.findIndex(chooses));
      const first = this.grid.querySelector(`.cell[data-layer="${row}"]`);
      if (first) first.tabIndex = 0;
      this.drawCellLegend();
    }

    strip(tokens, pieces, room, most) {
      const { view } = this;
      const strip = make("div", { class: "strip", role: "rowgroup" });
      strip.style.gridTemplateColumns = `${LABEL}px ${tokens.map((t) => `${room(pieces[t])}px`).join(" ")}`;
      strip.append(make("span", { class: "label" }), ...tokens.map((t) =>
        make("span", { class: "head", dir: "auto", "aria-hidden": "true", text: pieces[t] })));
      view.layers.forEach((layer, index) => {
        const fixed = !chooses(layer);
        const row = make("div", { role: "row", "aria-rowindex": index + 1 });
        row.style.display = "contents";
        const what = fixed ? `all ${layer.kind}` : `${percent(layer.use.attention)} dark`;
        const label = { class: fixed ? "label fixed" : "label", role: "rowheader", text: `${layer.number}  ${what}` };
        row.append(make("span", label));
        for (const t of tokens) {
          const operator = layer.operators[layer.choice[t]];
          const cell = make("div", { class: "cell", role: "gridcell", tabindex: -1, "data-layer": index,
            "data-token": t, "aria-label": `${pieces[t]}. ${facts(view, layer, t).join(", ")}` });
          cell.style.backgroundColor = css(mix(...ramp(operator), strength(layer, t, most)));
          if (fixed) cell.classList.add("fixed");
          if (operator === "attention") cell.classList.add("dark");
          if (operator === "rbf") cell.classList.add("middle");
          row.append(cell);
        }
        strip.append(row);
      });
      return strip;
    }

    drawCellLegend() {
      const { view } = this, nodes = [];
      const used = inOrder(view.layers.flatMap((layer) => layer.operators));
      for (const name of used) {
        const mark = { attention: "dark", rbf: "middle" }[name] ?? "";
        const swatch = make("span", { class: `swatch cell ${mark}` });
        swatch.style.backgroundColor = css(mix(...ramp(name), 0.7));
        nodes.push(swatch, make("span", { class: "name", text: nameOf(name) }));
      }
      if (view.layers.some((layer) => layer.thresholds)) nodes.push("stronger: farther from its threshold");
      else if (view.layers.some((layer) => layer.probability)) nodes.push("stronger: the router is more certain");
      this.cellLegend.replaceChildren(...nodes);
    }

    drawTable() {
      const { view } = this;
      const gated = view.layers.some((layer) => layer.gate), cut = view.layers.some((layer) => layer.thresholds);
      const head = ["Layer", "Kind", "Light to dark", "dark", "mean score"];
      head.push(...(cut ? ["τ"] : []), ...(gated ? ["gate"] : []));
      const numeric = new Set(["dark", "mean score", "τ", "gate"]);
      const rows = view.layers.map((layer) => {
        const bar = make("div", { class: "bar", role: "img", "aria-label":
          Object.entries(layer.use).map(([name, value]) => `${name} ${percent(value)}`).join(", ") });
        for (const [name, value] of Object.entries(layer.use)) {
          const part = make("i");
          part.style.width = `${100 * value}%`;
          part.style.backgroundColor = css(mix(...ramp(name), 0.8));
          bar.append(part);
        }
        const number = (text) => make("td", { class: "number", text });
        return make("tr", {}, [make("td", { text: layer.number }), make("td", { text: layer.kind }),
          make("td", { class: "wide" }, [bar]), number(percent(layer.use.attention ?? 0)),
          number(layer.entropy ? mean(layer.entropy).toFixed(4) : "–"),
          ...(cut ? [number(layer.thresholds ? layer.thresholds.map((v) => v.toFixed(4)).join(" / ") : "–")] : []),
          ...(gated ? [number(layer.gate ? mean(layer.gate).toFixed(3) : "–")] : [])]);
      });
      this.table.replaceChildren(make("table", {}, [make("thead", {}, [make("tr", {}, head.map((text) =>
        make("th", { text, scope: "col", class: numeric.has(text) ? "number" : "" })))]), make("tbody", {}, rows)]));
    }

    drawHistograms() {
      const { view } = this, histogram = view.histogram;
      this.histogramTitle.hidden = !histogram;
      if (!histogram) return this.histograms.replaceChildren();
      const noise = histogram.null ?? [], name = histogram.name[0].toUpperCase() + histogram.name.slice(1);
      const of = stackOf(view) ? "before the dark stack" : "of each layer's input";
      this.histogramTitle.textContent = `${name} ${of} (blue)${histogram.null ? " against white noise (grey)" : ""}`;
      const WIDE = 220, HIGH = 84, BASE = 70;
      const x = (value) => 4 + (value - histogram.low) / (histogram.high - histogram.low) * (WIDE - 8);
      this.histograms.replaceChildren(...histogram.layers.map(({ layer: index, density }) => {
        const layer = view.layers[index], bins = density.length, { number } = layer;
        const top = Math.max(...density, ...noise);
        const y = (value) => BASE - value / top * (BASE - 6);
        const at = (bin) => 4 + bin / bins * (WIDE - 8);
        const to = (bin, value) => `L${at(bin).toFixed(1)} ${y(value).toFixed(1)}`;
        const steps = (values) => values.map((value, bin) => to(bin, value) + to(bin + 1, value)).join("");
        const H = layer.entropy, away = (mean(H) - histogram.null_mean) / histogram.null_deviation;
        const beside = histogram.null ? `, white noise ${histogram.null_mean.toFixed(4)}` : "";
        const svg = draw("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label":
          `Layer ${number}: mean ${mean(H).toFixed(4)}${beside}` });
        if (histogram.null) {
          svg.append(draw("path", { class: "null", d: `M4 ${BASE}${steps(noise)}L${WIDE - 4} ${BASE}Z` }));
        }
        svg.append(
          draw("path", { class: "own", d: `M4 ${BASE}${steps(density)}L${WIDE - 4} ${BASE}Z` }),
          draw("path", { class: "axis", d: `M4 ${BASE}H${WIDE - 4}` }),
          draw("text", { x: 4, y: HIGH - 3 }, histogram.low.toFixed(3)),
          draw("text", { x: WIDE - 4, y: HIGH - 3, "text-anchor": "end" }, histogram.high.toFixed(3)));
        for (const cut of layer.thresholds ?? []) {
          if (cut < histogram.low || cut > histogram.high) continue;
          const near = Math.min(Math.max(x(cut), 40), WIDE - 40);
          svg.append(draw("path", { class: "cut", d: `M${x(cut).toFixed(1)} 2V${BASE}` }),
            draw("text", { x: near, y: HIGH - 3, "text-anchor": "middle" }, `τ ${cut.toFixed(3)}`));
        }
        const far = histogram.null ? `${signed(away, 1)} σ from noise` : mean(H).toFixed(3);
        const caption = make("figcaption", { text: `Layer ${number}: mean ${far}` });
        return make("figure", {}, [caption, svg]);
      }));
    }
  }

  function heading(about) {
    const notes = about.notes.map((text) => make("p", { class: "note", text }));
    const size = `${compact(about.parameters)} parameters, ${about.kinds.length} layers, width ${about.width}`;
    const what = make("p", { class: "about", text: `${size}; ${about.router}` });
    return make("div", {}, [make("h2", { text: about.name }), what, ...notes]);
  }

  // A selector of what the token colours mean, for one panel or two of one text; null if there is nothing to select.
  function colouring(panels, models) {
    const [first, second] = panels, words = { route: "route" };
    if (models.some((about) => about.kinds.includes("dark"))) Object.assign(words, { entropy: "entropy" });
    if (second) {
      Object.assign(first, { rival: second });
      Object.assign(second, { rival: first });
      words.loss = "difference of losses";
    }
    const choice = make("select", {}, Object.entries(words).map(([value, text]) => make("option", { value, text })));
    choice.value = words.entropy ? "entropy" : "route";
    choice.addEventListener("change", () => {
      for (const panel of panels) {
        panel.colouring = choice.value;
        if (panel.view) panel.drawWords();
      }
    });
    return Object.keys(words).length > 1 ? make("label", { class: "compare" }, ["Colour tokens by ", choice]) : null;
  }

  return { Panel, colouring, heading };
})();
