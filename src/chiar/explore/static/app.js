"use strict";
// The live page: what is typed is routed by every model; sliders move a model's routes; a model continues the text.
(() => {
  const { Panel, heading } = ChiarView;
  const { make, mean, percent, share, signed } = ChiarMarks;
  const byId = (id) => document.getElementById(id);
  const text = byId("text"), status = byId("status"), error = byId("error"), panelsRoot = byId("panels");
  const EXAMPLE = "Return the number of items in the list, or raise ValueError if it is empty.";
  let models = [], limits = {}, panels = [], stream = null, story = "";

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
      const problem = (await response.json().catch(() => ({}))).error;
      throw new Error(problem?.message || `The server answered ${response.status}.`);
    }
  }

  function complain(problem) {
    if (problem && problem.name === "AbortError") return;
    const silent = problem instanceof TypeError;  // fetch's word for no answer
    const sentence = silent ? "The server does not answer: is it still running?" : problem ? problem.message : "";
    error.textContent = sentence ? sentence[0].toUpperCase() + sentence.slice(1) : "";
    error.hidden = !sentence;
  }

  class Live {
    constructor(about, index) {
      this.about = about;
      this.index = index;
      this.continueButton = make("button", { type: "button", class: "primary", text: "Continue" });
      this.continueButton.setAttribute("aria-label", `Continue the text with ${about.name}`);
      this.continueButton.addEventListener("click", () => stream ? stream.abort() : this.carryOn());
      this.root = make("article", { class: "panel", "aria-label": about.name },
        [make("header", {}, [heading(about), this.continueButton])]);
      this.panel = new Panel(this.root);
      this.base = null;
      this.written = null;
      this.busy = this.again = false;
      this.slider();
    }

    slider() {
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
      this.kind.addEventListener("change", () => this.settle(true));
      this.range.addEventListener("input", () => { this.moved = true; this.say(); complain(null); this.route(); });
      this.reset.addEventListener("click", () => this.settle(true));
    }

    // The slider back to where the model itself is.
    settle(reroute) {
      if (!this.kind) return;
      this.moved = false;
      const shift = this.kind.value === "shift", reach = this.base?.reach ?? 0.1;
      const dark = this.base ? share(this.base) : 0.5;
      const end = shift ? 1.02 * reach : 1;
      Object.assign(this.range, { min: shift ? -end : 0, max: end, step: shift ? reach / 100 : 0.01 });
      this.range.value = shift ? 0 : dark;
      this.say();
      if (reroute) this.route();
    }

    say() {
      const value = Number(this.range.value), shift = this.kind.value === "shift";
      const digits = Math.max(2, Math.min(6, 2 - Math.floor(Math.log10(this.base?.reach ?? 0.1))));
      this.value.textContent = shift ? signed(value, digits - 1) : percent(value);
      this.range.setAttribute("aria-valuetext", this.value.textContent);
      this.reset.disabled = !this.moved;
    }

    get steer() {
      return this.kind && this.moved ? { kind: this.kind.value, value: Number(this.range.value) } : null;
    }

    // One request at a time; whatever changed meanwhile is asked next, so a dragged slider never queues up.
    async route() {
      if (this.busy) { this.again = true; return; }
      this.busy = true;
      this.root.classList.add("stale");
      try {
        do {
          this.again = false;
          if (!text.value || stream) break;
          const asked = text.value, steer = this.steer;
          if (this.base?.asked !== asked) {
            this.base = { ...await this.fetch(asked, null), asked };
            if (!this.moved) this.settle(false);
          }
          const view = steer ? await this.fetch(asked, steer) : this.base;
          if (text.value === asked && !stream) this.show(view, steer ? this.base : null);
        } while (this.again);
      } catch (problem) {
        complain(problem);
      } finally {
        this.busy = false;
        this.root.classList.remove("stale");
      }
    }

    async fetch(asked, steer) {
      return (await ask("api/route", { model: this.index, text: asked, steer })).json();
    }

    show(view, base) {
      if (this.range) this.range.disabled = false;
      this.panel.update(view, { base, written: this.written });
      count(view.tokens.length);
    }

    async carryOn() {
      if (!text.value) { text.focus(); return; }
      stream = new AbortController();
      status.textContent = `${this.about.name} is writing; Escape stops it.`;
      complain(null);
      lock(this);
      this.continueButton.textContent = "Stop";
      this.continueButton.setAttribute("aria-label", "Stop writing");
      const prompt = text.value;
      let written = "", view = null, ended = false;
      try {
        const response = await ask("api/continue", { model: this.index, text: prompt, steer: this.steer,
          tokens: Number(byId("tokens").value), temperature: Number(byId("temperature").value),
          seed: Math.floor(Math.random() * 2 ** 31) }, stream.signal);
        for await (const record of lines(response.body)) {
          if (record.view) {
            view = record.view;
            this.written = view.tokens.length;
          } else if (record.token) {
            extend(view, record);
            written = record.text;
          }
          ended = record.end === true;
          this.draw(view);
        }
        if (!ended) throw new Error("The server broke off in the middle of the text.");
      } catch (problem) {
        complain(problem);
      }
      const stopped = stream.signal.aborted;
      stream = null;
      lock(null);
      this.continueButton.textContent = "Continue";
      this.continueButton.setAttribute("aria-label", `Continue the text with ${this.about.name}`);
      story = "";
      if (!view) return;
      for (const live of panels) live.written = live === this ? this.written : null;
      text.value = prompt + written;
      story = `; ${view.tokens.length - this.written} written${stopped ? ", then stopped" : ""}`;
      for (const live of panels) live.route();
    }

    // Not more often than half of the time goes into drawing, however fast tokens come.
    draw(view) {
      this.drawn = view;
      this.timer ??= setTimeout(() => {
        this.timer = null;
        if (!stream) return;
        const began = performance.now();
        this.panel.update(this.drawn, { written: this.written });
        this.cost = performance.now() - began;
      }, this.cost ?? 0);
    }
  }

  // One more token in a view.
  function extend(view, record) {
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

  // While one model writes, the text stays as it is and the others wait.
  function lock(writer) {
    text.readOnly = writer !== null;
    for (const live of panels) live.continueButton.disabled = writer !== null && live !== writer;
  }

  function count(tokens) {
    const [now, most] = [tokens, limits.most_tokens].map((number) => number.toLocaleString("en"));
    status.textContent = `${now} of at most ${most} tokens${story}`;
  }

  let pause = null;
  text.addEventListener("input", () => {
    clearTimeout(pause);
    for (const live of panels) live.written = null;
    story = "";
    complain(null);
    if (!text.value) { status.textContent = "Type something to route."; return; }
    pause = setTimeout(() => { for (const live of panels) live.route(); }, 200);
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && panels[0] && !stream) panels[0].carryOn();
  });
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
    complain(problem);
  });
})();
