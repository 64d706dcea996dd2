"use strict";
// The views a report carries, drawn where it has a place for them.
for (const [number, views] of JSON.parse(document.getElementById("views").textContent).entries()) {
  const place = document.getElementById(`prompt-${number + 1}`);
  for (const view of views) {
    const root = ChiarMarks.make("article", { class: "panel", "aria-label": view.model.name },
      [ChiarMarks.make("header", {}, [ChiarView.heading(view.model)])]);
    place.append(root);
    new ChiarView.Panel(root).update(view);
  }
}
