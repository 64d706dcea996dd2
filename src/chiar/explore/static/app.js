"use strict";
// The live page: every model routes the typed text; sliders move a model's routes; a model continues the text.
(() => {
  const { Panel, colouring, heading } = ChiarView;
  const { make, mean, percent, share, signed } = ChiarMarks;
  const byId = (id) => document.getElementById(id);
  const text = byId("text"), status = byId("status"), error = byId("error"), panelsRoot = byId("panels");
  const both = byId("both");
  const EXAMPLE = "Return the number of items in the list, or raise ValueError if it is empty.";
  let models = [], limits = {}, panels = [], stream = null, outcome = "";

  async function ask(path, body, signal) {
    const options = body === undefined ? {} :
      { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
    for (let attempt = 0; ; attempt++) {
      const response = await fetch(path, { ...options, signal });
      if (response.status === 429 && attempt < 5) {
        status.textContent = "The server is busy, trying again …";
        await new Promise((done) => setTimeout(done, 1000 * Number(response.headers.get("Retry-After") || 1)));
        continue;
      }
      if (response.ok) return response;
      const { message, param } = (await response.json().catch(() => ({}))).error ?? {};
      const label = param && byId(param)?.labels[0].firstChild.textContent.trim();  // the field's name on this page
      const sentence = message || `The server answered ${response.status}.`;
      throw new Error(label ? sentence.replace(`'${param}'`, label) : sentence);
    }
  }

  function showError(problem) {
    if (problem && problem.name === "AbortError") return;
    const unanswered = problem instanceof TypeError;  // what fetch throws without a response
    const sentence = unanswered ? "The server does not answer: is it still running?" : problem ? problem.message : "";
    error.textContent = sentence ? sentence[0].toUpperCase() + sentence.slice(1) : "";
    error.hidden = !sentence;
    if (sentence) status.textContent = "";
  }

  class Live {
    constructor(about, index) {
      this.about = about;
      this.index = index;
      this.continueButton = make("button", { type: "button", class: "primary", text: "Continue" });
      this.continueButton.addEventListener("click", () => stream ? stream.abort() : continueText([this]));
      this.root = make("article", { class: "panel", "aria-label": about.name },
        [make("header", {}, [heading(about), this.continueButton])]);
      this.panel = new Panel(this.root);
      this.base = null;
      this.written = null;
      this.tail = "";
      this.busy = this.again = false;
      this.addSlider();
    }

    addSlider() {
      if (!this.about.steer.length) {
        this.panel.slot.append(make("p", { class: "steer", text: this.about.unsteerable }));
        this.panel.slot.firstChild.style.display = "block";
        return;
      }
      const names = { share: "Share to attention", shift: "Threshold shift" };
      this.kind = make("select", { "aria-label": "What the slider moves" },
        this.about.steer.map((kind) => make("option", { value: kind, text: names[kind] })));
      const name = `Move the routes of ${this.about.name}`;
      this.range = make("input", { type: "range", "aria-label": name, disabled: "" });
      this.value = make("output");
      this.reset = make("button", { type: "button", text: "Reset", disabled: "" });
      this.panel.slot.append(make("div", { class: "steer" }, [this.kind, this.range, this.value, this.reset]));
      this.moved = false;
      this.kind.addEventListener("change", () => this.resetSlider(true));
      this.range.addEventListener("input", () => {
        this.moved = true;
        this.showValue();
        showError(null);
        this.route();
      });
      this.reset.addEventListener("click", () => this.resetSlider(true));
    }

    // Moves the slider to the model's own routes.
    resetSlider(reroute) {
      if (!this.kind) return;
      this.moved = false;
      const shift = this.kind.value === "shift", reach = this.base?.reach ?? 0.1;
      const dark = this.base ? share(this.base) : 0.5;
      const end = shift ? 1.02 * reach : 1;
      Object.assign(this.range, { min: shift ? -end : 0, max: end, step: shift ? reach / 100 : 0.01 });
      this.range.value = shift ? 0 : dark;
      this.showValue();
      if (reroute) this.route();
    }

    showValue() {
      const value = Number(this.range.value), shift = this.kind.value === "shift";
      const digits = Math.max(2, Math.min(6, 2 - Math.floor(Math.log10(this.base?.reach ?? 0.1))));
      this.value.textContent = shift ? signed(value, digits - 1) : percent(value);
      this.range.setAttribute("aria-valuetext", this.value.textContent);
      this.reset.disabled = !this.moved;
    }

    get steer() {
      return this.kind && this.moved ? { kind: this.kind.value, value: Number(this.range.value) } : null;
    }

    // The text, and after it what this model alone wrote.
    get fullText() {
      return text.value && text.value + this.tail;
    }

    // One request at a time. The next one sends all changes made meanwhile, so a dragged slider queues no requests.
    async route() {
      if (this.busy) { this.again = true; return; }
      this.busy = true;
      this.root.classList.add("stale");
      do {
        this.again = false;
        const { fullText, steer } = this;
        if (!fullText || stream) break;
        try {
          if (this.base?.fullText !== fullText) {
            this.base = { ...await this.fetch(fullText, null), fullText };
            if (!this.moved) this.resetSlider(false);
          }
          const view = steer ? await this.fetch(fullText, steer) : this.base;
          if (this.fullText === fullText && !stream) this.show(view, steer ? this.base : null);
        } catch (problem) {
          if (this.again || this.fullText !== fullText) continue;
          this.clear();
          showError(problem);
        }
      } while (this.again);
      this.busy = false;
      this.root.classList.remove("stale");
    }

    // A panel always shows the current text: nothing if that is empty or was refused.
    clear() {
      this.base = null;
      if (this.range) this.range.disabled = true;
      this.panel.clear();
    }

    async fetch(fullText, steer) {
      return (await ask("api/route", { model: this.index, text: fullText, steer })).json();
    }

    show(view, base) {
      if (this.range) this.range.disabled = false;
      this.panel.update(view, { base, written: this.written });
      showCount();
    }

    // Continues the text and draws it token by token. Returns what was written and its number of tokens, or null.
    async write(sampling, signal) {
      let written = "", view = null, promptLength = 0, ended = false;
      try {
        const body = { model: this.index, text: this.fullText, steer: this.steer, ...sampling };
        const response = await ask("api/continue", body, signal);
        for await (const record of lines(response.body)) {
          if (record.view) {
            view = record.view;
            promptLength = view.tokens.length;
            this.written ??= promptLength;
          } else if (record.token) {
            append(view, record);
            written = record.text;
          }
          ended = record.end === true;
          this.draw(view);
        }
        if (!ended) throw new Error("The server broke off in the middle of the text.");
      } catch (problem) {
        showError(problem);
      }
      return view && { text: written, tokens: view.tokens.length - promptLength };
    }

    // Waits as long as the last drawing took, so that at most half of the time goes into drawing.
    draw(view) {
      this.drawn = view;
      this.timer ??= setTimeout(() => {
        this.timer = null;
        if (!stream) return;
        const start = performance.now();
        this.panel.update(this.drawn, { written: this.written });
        this.panel.words.scrollTop = this.panel.words.scrollHeight;
        this.cost = performance.now() - start;
      }, this.cost ?? 0);
    }
  }

  // Appends a token to a view.
  function append(view, record) {
    view.tokens.push(record.token);
    view.layers.forEach((layer, i) => {
      const next = record.layers[i], before = layer.choice.length;
      for (const name of ["choice", "entropy", "gate", "probability"]) if (layer[name]) layer[name].push(...next[name]);
      for (const name of Object.keys(layer.use)) {
        layer.use[name] = (layer.use[name] * before + next.use[name]) / (before + 1);
      }
    });
    const nats = view.tokens.map((token) => token.nats).filter((value) => value !== null);
    view.loss = nats.length ? mean(nats) : null;
    view.perplexity = nats.length ? Math.exp(view.loss) : null;
  }

  async function* lines(body) {
    const reader = body.getReader(), decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = parts.pop();
      for (const part of parts) yield JSON.parse(part);
    }
  }

  // One model's text goes into the field, for all to route. Two models each keep theirs, after the shared prompt.
  async function continueText(writers) {
    if (!text.value) { text.focus(); return; }
    const number = ({ value }) => value === "" ? value : Number(value);
    const sampling = { tokens: number(byId("tokens")), temperature: number(byId("temperature")),
      seed: Math.floor(Math.random() * 2 ** 31) };
    const names = writers.map((live) => live.about.name).join(" and "), several = writers.length > 1;
    stream = new AbortController();
    outcome = "";
    showError(null);
    status.textContent = `${names} ${several ? "are" : "is"} writing; Escape stops ${several ? "them" : "it"}.`;
    lock(writers);
    const texts = await Promise.all(writers.map((live) => live.write(sampling, stream.signal)));
    const stopped = stream.signal.aborted ? ", then stopped" : "";
    stream = null;
    lock([]);
    const counts = texts.map((own) => own?.tokens ?? 0).join(" and ");
    if (texts.some((own) => own)) outcome = `; ${counts} written${stopped}`;
    writers.forEach((live, i) => { live.tail += texts[i]?.text ?? ""; });
    if (!several && texts[0]) {
      text.value += writers[0].tail;
      for (const live of panels) live.tail = "";
      for (const live of panels) if (live !== writers[0]) live.written = null;
    }
    for (const live of panels) live.route();
  }

  // While models write, the text is read-only and the others cannot continue it.
  function lock(writers) {
    text.readOnly = writers.length > 0;
    for (const live of panels) {
      const writes = writers.includes(live), name = writes ? "Stop writing" : `Continue the text with ${live.about.name}`;
      live.continueButton.disabled = writers.length > 0 && !writes;
      live.continueButton.textContent = writes ? "Stop" : "Continue";
      live.continueButton.setAttribute("aria-label", name);
    }
    both.disabled = writers.length === 1;
    both.textContent = writers.length > 1 ? "Stop both" : "Continue with both";
  }

  function showCount() {
    const most = Math.max(...panels.map(({ panel }) => panel.view?.tokens.length ?? 0)).toLocaleString("en");
    status.textContent = `${most} of at most ${limits.most_tokens.toLocaleString("en")} tokens${outcome}`;
  }

  let pause = null;
  text.addEventListener("input", () => {
    clearTimeout(pause);
    for (const live of panels) Object.assign(live, { written: null, tail: "" });
    outcome = "";
    showError(null);
    if (!text.value) {
      for (const live of panels) live.clear();
      status.textContent = "Type something to route.";
      return;
    }
    pause = setTimeout(() => { for (const live of panels) live.route(); }, 200);
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && panels[0] && !stream) continueText(panels);
  });
  both.addEventListener("click", () => stream ? stream.abort() : continueText(panels));
  addEventListener("keydown", (event) => { if (event.key === "Escape" && stream) stream.abort(); });

  function begin(record) {
    models = record.models;
    limits = record;
    byId("start").hidden = models.length > 0;
    byId("composer").hidden = !models.length;
    if (!models.length) {
      byId("demo").hidden = !record.demo.length;
      return;
    }
    panels = models.map((about, index) => new Live(about, index));
    panelsRoot.replaceChildren(...panels.map((live) => live.root));
    panelsRoot.classList.toggle("pair", panels.length > 1);
    both.hidden = panels.length < 2;
    document.querySelector(".tools").append(colouring(panels.map((live) => live.panel), models) ?? "");
    lock([]);
    text.value ||= EXAMPLE;
    for (const live of panels) live.route();
  }

  byId("open-demo").addEventListener("click", async (event) => {
    event.target.disabled = true;
    event.target.textContent = "Loading …";
    try {
      begin(await (await ask("api/demo", {})).json());
    } catch (problem) {
      event.target.disabled = false;
      event.target.textContent = problem.message;
    }
  });

  ask("api/models").then((response) => response.json()).then(begin).catch((problem) => {
    byId("composer").hidden = false;
    showError(problem);
  });
})();
