"use strict";
// Builds a report from its data: sections with a prompt and its views, or a table. Text is only inserted as text.
(() => {
  const { make } = ChiarMarks;
  const row = (kind, texts) => make("tr", {}, texts.map((text, column) =>
    make(kind, { text, ...(kind === "th" && { scope: "col" }), ...(column && { class: "number" }) })));

  function* parts({ title, prompt, views, picture, head, rows, notes }) {
    yield make("h2", { class: "section", text: title });
    if (views) {
      yield make("blockquote", { dir: "auto", text: prompt });
      yield make("div", { class: views.length > 1 ? "panels pair" : "panels" }, views.map((view) => make("article",
        { class: "panel", "aria-label": view.model.name }, [make("header", {}, [ChiarView.heading(view.model)])])));
    }
    if (picture) {
      yield make("div", { class: "curves scroll" }, [make("img", { alt: "training curves", src: picture })]);
    }
    if (rows) {
      yield make("div", { class: "scroll" }, [make("table", {}, [make("thead", {}, [row("th", head)]),
        make("tbody", {}, rows.map((texts) => row("td", texts)))])]);
    }
    for (const text of notes ?? []) yield make("p", { class: "note", text });
  }

  const main = document.querySelector("main");
  for (const section of JSON.parse(document.getElementById("sections").textContent)) {
    main.append(make("section", {}, [...parts(section)]));
    // A panel measures its element, which must be in the document by then.
    const panels = [...main.lastChild.querySelectorAll("article.panel")].map((node) => new ChiarView.Panel(node));
    const choice = panels.length && ChiarView.colouring(panels, section.views.map((view) => view.model));
    if (choice) main.lastChild.querySelector(".panels").before(choice);
    panels.forEach((panel, number) => panel.update(section.views[number]));
  }
})();
